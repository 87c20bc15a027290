"""Turns the GGUF checkpoint into a folder SGLang can serve: float32 safetensors, tokenizer, chat template.

Runs as a process of its own (`python -m granikv_sglang.embedded.convert model.gguf folder`): the memory it needs is
given back when it ends, torch's threads do not stay in a server that is about to fork, and what `transformers` has to
say on stderr can be kept from the user unless it fails. Each phase is announced on stdout by one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

CONTEXT_TOKENS = 8192
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_QUESTION = "What is the capital of France?"
_ANSWER = "Paris"


def main(argv: list[str] | None = None) -> int:
    """Convert argv[0] (a GGUF file) into argv[1] (an existing, empty folder). Raises when the result is not right."""
    gguf, folder = (Path(argument) for argument in (sys.argv[1:] if argv is None else argv))
    _announce("converting weights")
    _save_weights(gguf, folder)
    _announce("converting tokenizer")
    _save_tokenizer(gguf, folder)
    _announce("asking it a question")
    check_model(folder)
    return 0


def check_model(folder: Path) -> None:
    """Load a converted folder and ask it a question with a known answer. Raises ValueError if anything is off."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if model.dtype != torch.float32:
        raise ValueError(f"the weights load as {model.dtype}, not float32")
    start, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in (TURN_START, TURN_END))
    if len(start) != 1 or len(end) != 1:
        raise ValueError(f"{TURN_START} and {TURN_END} are not single tokens: {start} {end}")
    stops = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    if set(stops) != set(end):
        raise ValueError(f"tokenizer, config and generation config stop at {stops}, not all at {TURN_END} ({end[0]})")
    messages = [{"role": "user", "content": _QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    if _ANSWER not in answer or output[-1].item() != end[0]:
        raise ValueError(f"asked {_QUESTION!r}, it answered {answer!r} and ended with token {output[-1].item()}")


def _save_weights(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.save_pretrained(folder)


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"expected a fast tokenizer from {gguf.name}, got {type(tokenizer).__name__}")
    # What transformers 5.12 makes of this GGUF's header is wrong in four ways; each is set from what the header says.
    # 1. eos becomes <|im_start|>, so a chat would never stop (header: eos and padding are token 2).
    tokenizer.eos_token = TURN_END
    tokenizer.pad_token = TURN_END
    # 2. The context length is lost.
    tokenizer.model_max_length = CONTEXT_TOKENS
    # 3. Clean-up of spaces is on, which byte-level text does not survive.
    tokenizer.clean_up_tokenization_spaces = False
    # 4. The pre-tokeniser "smollm" splits digits one by one; decoding is byte-level and nothing more.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(folder)


def _announce(phase: str) -> None:
    print(phase, flush=True)


if __name__ == "__main__":
    sys.exit(main())
