"""What GraniKV refuses, said before anything is loaded. Each refusal is one line that names the flag and the mend.

The list is design section 7: these would be silently wrong or are not proven yet.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from granikv_sglang.config import NAME, GraniKVConfig
from granikv_sglang.core import GraniKVError, Regime

SGLANG_VERSION = "0.5.17"

# attribute of ServerArgs -> (is it refused?, flag as typed, mend)
_REFUSED: tuple[tuple[str, Any, str, str], ...] = (
    ("disable_radix_cache", bool, "--disable-radix-cache", "drop it: HOT prefixes live in the radix cache"),
    ("page_size", lambda v: v not in (None, 1), "--page-size above 1", "use --page-size 1"),
    ("enable_hierarchical_cache", bool, "--enable-hierarchical-cache", "drop it"),
    ("enable_lmcache", bool, "--enable-lmcache", "drop it"),
    ("enable_flexkv", bool, "--enable-flexkv", "drop it"),
    ("speculative_algorithm", lambda v: v is not None, "--speculative-algorithm", "drop it"),
    (
        "disaggregation_mode",
        lambda v: v not in (None, "null"),
        "--disaggregation-mode",
        "serve both phases in one place",
    ),
    ("enable_dp_attention", bool, "--enable-dp-attention", "drop it"),
    ("pp_size", lambda v: v > 1, "--pp-size above 1", "use --pp-size 1"),
    ("dcp_size", lambda v: v > 1, "--dcp-size above 1", "use --dcp-size 1"),
    ("enable_mixed_chunk", bool, "--enable-mixed-chunk", "drop it"),
    ("enable_pdmux", bool, "--enable-pdmux", "drop it"),
    ("enable_two_batch_overlap", bool, "--enable-two-batch-overlap", "drop it"),
    ("enable_streaming_session", bool, "--enable-streaming-session", "drop it"),
    ("enable_session_radix_cache", bool, "--enable-session-radix-cache", "drop it"),
    ("enable_hisparse", bool, "--enable-hisparse", "drop it"),
    ("enable_unified_memory", bool, "--enable-unified-memory", "drop it"),
    ("tokenizer_worker_num", lambda v: v > 1, "--tokenizer-worker-num above 1", "use --tokenizer-worker-num 1"),
    ("dllm_algorithm", lambda v: v is not None, "--dllm-algorithm", "drop it"),
    (
        "kv_cache_dtype",
        lambda v: v not in ("auto", "bfloat16", "bf16", "float16", "float32", None),
        "--kv-cache-dtype with a quantised type",
        "use --kv-cache-dtype auto",
    ),
)


def selected(server_args: Any) -> bool:
    """Whether this server runs GraniKV. Raises GraniKVError when only one of the two names was given."""
    names = [n for n in (server_args.attention_backend, *_phase_backends(server_args)) if n is not None]
    attention = NAME in names
    radix = server_args.radix_cache_backend == NAME
    if attention and not radix:
        raise GraniKVError("--attention-backend granikv needs --radix-cache-backend granikv as well")
    if radix and not attention:
        raise GraniKVError("--radix-cache-backend granikv needs --attention-backend granikv as well")
    return attention


def _phase_backends(server_args: Any) -> tuple[str | None, str | None]:
    return server_args.prefill_attention_backend, server_args.decode_attention_backend


def refuse_unsupported(server_args: Any) -> None:
    """Raise GraniKVError for the first flag that GraniKV does not support together with itself."""
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise GraniKVError(f"this GraniKV is built for sglang {SGLANG_VERSION}, found {found}; install that version")
    for attribute, refused, flag, mend in _REFUSED:
        # A flag this SGLang does not know cannot have been given.
        value = vars(server_args).get(attribute)
        if value is not None and refused(value):
            raise GraniKVError(f"GraniKV does not support {flag}; {mend}, or start with --granikv-off")
    if any(name is not None for name in _phase_backends(server_args)):
        raise GraniKVError(
            "GraniKV wraps one backend for both phases: instead of --prefill-attention-backend and "
            "--decode-attention-backend give --granikv-stock-backend"
        )


def refuse_options(config: GraniKVConfig, device: str) -> None:
    """Raise GraniKVError when GraniKV's own options exclude each other or the device."""
    if config.hot == "off" and config.regime not in (Regime.CASCADE, Regime.UNIFORM):
        raise GraniKVError("--granikv-hot off leaves no extents for other regimes; add --granikv-regime cascade")
    if config.hot == "off" and device == "cpu":
        raise GraniKVError(
            "--granikv-hot off needs an NVIDIA GPU, the CPU's engine reads HOT extents only; leave it out"
        )


def refuse_model(model_config: Any) -> None:
    """Raise GraniKVError when the model's attention is of a kind whose shared prefix would be computed wrongly."""
    architecture = ", ".join(model_config.hf_config.architectures or ["unknown"])
    text = model_config.hf_text_config
    mend = "serve it with --granikv-off"
    if model_config.attention_arch.name != "MHA":
        raise GraniKVError(f"{architecture} uses {model_config.attention_arch.name} attention, unsupported; {mend}")
    if model_config.is_hybrid_swa or _window(text):
        raise GraniKVError(
            f"{architecture} has sliding-window layers, unsupported: a prefix is not visible to all; {mend}"
        )
    if getattr(text, "attn_logit_softcapping", None):
        raise GraniKVError(f"{architecture} caps attention logits, unsupported; {mend}")
    if model_config.is_encoder_decoder or not model_config.is_generation:
        raise GraniKVError(f"{architecture} is not a decoder-only generation model, unsupported; {mend}")


def _window(text_config: Any) -> bool:
    window = getattr(text_config, "sliding_window", None)
    # Qwen2 configs name a window and switch it off.
    return bool(window) and bool(getattr(text_config, "use_sliding_window", True))
