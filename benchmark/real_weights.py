"""Real weights: greedy answers and their log-probabilities under GraniKV and under several stock backends.

A kernel may differ from another in the last bits, and greedy decoding turns such a bit into another word where two
tokens are nearly tied. So no backend can be asked to equal another for ever; GraniKV must not differ from the stock
backends by more than they differ from each other. Every engine answers the same prompts (three groups on long common
texts, and outsiders) in two waves: the second finds the prefixes HOT when it is prefilled. For each pair of engines
this prints, over the tokens up to and including the first on which they part:

* agreement: chosen tokens that are the same, with its standard error;
* difference of the chosen token's log-probability, mean and 99th percentile, where both chose the same.

    python benchmark/real_weights.py --stock flashinfer triton     (on a GPU, SmolLM2 in bfloat16)
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import sglang as sgl
import torch
from transformers import AutoTokenizer

from granikv_sglang.config import NAME, GraniKVConfig
from granikv_sglang.core import commit
from granikv_sglang.demo.teams import TEAMS

RESULTS = Path(__file__).parent / "results"
Answer = tuple[list[int], list[float]]
"""Token ids of one answer and the log-probability of each."""


def prompts_of(tokenizer: Any, members: int) -> tuple[list[list[int]], int]:
    """Prompts of three groups and eight outsiders, and the length of the longest common prefix."""
    both = f"{TEAMS[0].prefix}\n\n{TEAMS[1].prefix}"
    groups = [(team.prefix, team.asks) for team in TEAMS] + [(both, TEAMS[0].asks + TEAMS[1].asks)]
    texts = []
    for prefix, asks in groups:
        for i in range(members):
            _, question = asks[i % len(asks)]
            texts.append(f"{prefix}Agent {i} asks: {question}<|im_end|>\n<|im_start|>assistant\n")
    for i in range(8):
        texts.append(f"<|im_start|>user\nGive {i + 2} reasons to write things down.<|im_end|>\n<|im_start|>assistant\n")
    return [tokenizer(text)["input_ids"] for text in texts], len(tokenizer(both)["input_ids"])


def answers(engine: Any, prompts: list[list[int]], prefixes: list[list[int]], tokens: int) -> list[Answer]:
    """Greedy answers; the prefixes are asked for first, so that every engine decodes on a warm cache."""
    engine.flush_cache()
    engine.generate(input_ids=prefixes, sampling_params={"max_new_tokens": 1, "temperature": 0})
    result: list[Answer | None] = [None] * len(prompts)
    for wave in range(2):
        replies = engine.generate(
            input_ids=prompts[wave::2],
            sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
        )
        chosen = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
        result[wave::2] = [([token for _, token, _ in own], [value for value, _, _ in own]) for own in chosen]
    return [answer for answer in result if answer is not None]


def compare(ours: list[Answer], theirs: list[Answer]) -> dict[str, Any]:
    """How far two engines are apart, over tokens that both chose from the same context."""
    same, seen, equal, differences = 0, 0, 0, []
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(ours, theirs, strict=True):
        common = _common(tokens, other_tokens)
        same += common
        seen += min(common + 1, len(tokens))
        equal += common == len(tokens)
        differences += [abs(a - b) for a, b in zip(logprobs[:common], other_logprobs[:common], strict=True)]
    agreement = same / seen
    return {
        "answers_equal": f"{equal} of {len(ours)}",
        "agreement": round(agreement, 5),
        "agreement_se": round(float(np.sqrt(agreement * (1 - agreement) / seen)), 5),
        "tokens_compared": seen,
        "logprob_difference_mean": round(float(np.mean(differences)), 6),
        "logprob_difference_p99": round(float(np.quantile(differences, 0.99)), 6),
    }


def _common(tokens: list[int], others: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))


def shared_decodes(steps: dict[str, dict[str, int]]) -> int:
    """Decode passes in a shared regime; a prefill over HOT prefixes is counted under CASCADE, but is none."""
    counts = (by for regime, by in steps.items() if regime != "uniform")
    return sum(n for by in counts for why, n in by.items() if why != "hot_prefill")


def engine_of(name: str, args: argparse.Namespace, memory: float) -> Any:
    """``granikv``, ``granikv:<regime>`` or the name of a stock attention backend."""
    ours, _, regime = name.partition(":")
    options: dict[str, Any] = {"attention_backend": name}
    if ours == NAME:
        GraniKVConfig(min_tokens=256, stock_backend=args.stock[0], regime=regime or "auto").to_env()
        options = {"attention_backend": NAME, "radix_cache_backend": NAME}
    if torch.cuda.is_available():
        options |= {"dtype": "bfloat16", "mem_fraction_static": memory, "cuda_graph_max_bs_decode": 160}
    else:
        options |= {"device": "cpu", "dtype": "float32"}
    return sgl.Engine(
        model_path=str(args.model),
        skip_tokenizer_init=True,
        max_total_tokens=args.pool,
        max_running_requests=160,
        log_level="warning",
        random_seed=1,
        **options,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config, weights and tokenizer")
    parser.add_argument("--stock", nargs="+", default=["flashinfer", "triton"], help="the first is the one we wrap")
    parser.add_argument("--ours", nargs="+", default=[NAME], help=f"{NAME} or {NAME}:REGIME")
    parser.add_argument("--members", type=int, default=24, help="requests in each of the three groups")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pool", type=int, default=120000)
    parser.add_argument("--commit", default="", help="commit to record; default: what git says here")
    parser.add_argument("--out", type=Path, default=RESULTS / "real_weights.jsonl")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts, longest = prompts_of(tokenizer, args.members)
    heads = [prompts[group * args.members][:-40] for group in range(3)]
    found: dict[str, list[Answer]] = {}
    shared = {}
    for place, name in enumerate([*args.ours, *args.stock]):
        engine = engine_of(name, args, 0.2 + 0.1 * place)
        found[name] = answers(engine, prompts, heads, args.tokens)
        if name.startswith(NAME):
            shared[name] = engine.get_server_info()["internal_states"][0][NAME]["counters"]["steps"]
            if not shared_decodes(shared[name]):
                print(f"{name}: NO decode pass was shared, the run shows nothing of it", file=sys.stderr, flush=True)
        engine.shutdown()
        print(f"{name}: {len(prompts)} answers of {args.tokens} tokens", file=sys.stderr, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    print(f"\n{'pair':<34} equal       agreement          |logprob| mean   p99")
    with args.out.open("a") as out:
        for a, b in itertools.combinations(found, 2):
            row = compare(found[a], found[b])
            print(
                f"{a + ' / ' + b:<34} {row['answers_equal']:<11} {row['agreement']:.4f} +- {row['agreement_se']:<8.4f} "
                f"{row['logprob_difference_mean']:<16.6f} {row['logprob_difference_p99']:.6f}"
            )
            row |= {"pair": [a, b], "gpu": gpu, "commit": args.commit or commit(), "date": time.strftime("%Y-%m-%d")}
            row |= {"prompts": len(prompts), "longest_prefix": longest, "output_tokens": args.tokens, "regimes": shared}
            row |= {n: version(n) for n in ("sglang", "torch", "flashinfer-python")}
            out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
