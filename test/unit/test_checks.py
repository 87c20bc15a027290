"""Refusals: every unsupported flag and model class is named, in one line, before anything starts."""

import dataclasses
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import GraniKVError
from granikv_sglang.plugin import checks

REFUSED_VALUES = {
    "disable_radix_cache": True,
    "page_size": 16,
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "enable_flexkv": True,
    "speculative_algorithm": "NGRAM",
    "disaggregation_mode": "prefill",
    "enable_dp_attention": True,
    "pp_size": 2,
    "dcp_size": 2,
    "enable_mixed_chunk": True,
    "enable_pdmux": True,
    "enable_two_batch_overlap": True,
    "enable_streaming_session": True,
    "enable_session_radix_cache": True,
    "enable_hisparse": True,
    "enable_unified_memory": True,
    "tokenizer_worker_num": 2,
    "dllm_algorithm": "LowConfidence",
    "kv_cache_dtype": "fp8_e4m3",
}


def stock_args(**changes):
    values = {f.name: f.default for f in dataclasses.fields(ServerArgs) if f.default is not dataclasses.MISSING}
    return SimpleNamespace(**{**values, **changes})


def model(**changes):
    values = {
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
        "hf_text_config": SimpleNamespace(),
        "attention_arch": SimpleNamespace(name="MHA"),
        "is_hybrid_swa": False,
        "is_encoder_decoder": False,
        "is_generation": True,
    }
    return SimpleNamespace(**{**values, **changes})


def refusal(call) -> str:
    with pytest.raises(GraniKVError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sglangs_own_defaults_are_supported():
    checks.refuse_unsupported(stock_args())
    checks.refuse_model(model())


def test_every_refused_attribute_exists_in_this_sglang_and_is_tested():
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    named = {attribute for attribute, *_ in checks._REFUSED}
    assert named <= fields
    assert named == REFUSED_VALUES.keys()


@pytest.mark.parametrize("attribute", REFUSED_VALUES)
def test_unsupported_flags_are_refused_with_a_mend(attribute):
    text = refusal(lambda: checks.refuse_unsupported(stock_args(**{attribute: REFUSED_VALUES[attribute]})))
    assert "--" + attribute.replace("_", "-") in text
    assert "--granikv-off" in text


def test_split_backends_are_refused():
    text = refusal(lambda: checks.refuse_unsupported(stock_args(decode_attention_backend="triton")))
    assert "--granikv-stock-backend" in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"hf_text_config": SimpleNamespace(sliding_window=4096)}, "sliding-window"),
        ({"hf_text_config": SimpleNamespace(attn_logit_softcapping=50.0)}, "caps attention logits"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"is_generation": False}, "decoder-only"),
    ],
)
def test_unsupported_models_are_refused(changes, word):
    text = refusal(lambda: checks.refuse_model(model(**changes)))
    assert word in text
    assert "--granikv-off" in text


def test_a_window_that_the_model_switches_off_is_fine():
    checks.refuse_model(model(hf_text_config=SimpleNamespace(sliding_window=4096, use_sliding_window=False)))


def test_another_sglang_version_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "version", lambda _: "0.5.23")
    text = refusal(lambda: checks.refuse_unsupported(stock_args()))
    assert "0.5.23" in text
    assert checks.SGLANG_VERSION in text


def test_one_name_without_the_other_is_refused():
    assert not checks.selected(stock_args())
    assert checks.selected(stock_args(attention_backend="granikv", radix_cache_backend="granikv"))
    assert "--radix-cache-backend" in refusal(lambda: checks.selected(stock_args(attention_backend="granikv")))
    assert "--attention-backend" in refusal(lambda: checks.selected(stock_args(radix_cache_backend="granikv")))


@pytest.mark.parametrize(
    ("options", "device", "word"),
    [
        ({"hot": "off"}, "cuda", "--granikv-regime cascade"),
        ({"hot": "off", "regime": "batched_gemm"}, "cuda", "--granikv-regime cascade"),
        ({"hot": "off", "regime": "cascade"}, "cpu", "NVIDIA GPU"),
        ({"hot": "off", "regime": "cascade"}, "cuda", None),
        ({}, "cpu", None),
    ],
)
def test_options_that_exclude_each_other(options, device, word):
    if word is None:
        checks.refuse_options(GraniKVConfig(**options), device)
        return
    with pytest.raises(GraniKVError, match=word):
        checks.refuse_options(GraniKVConfig(**options), device)
