"""A Llama of two tiny layers with real (random) weights: milliseconds a step, and its answers depend on every K and V.

SGLang's dummy weights are so small that attention hardly changes a token; a wrong slot would go unseen.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
CONTEXT = 4096


def tiny_model(folder: Path, seed: int = 0, heads: tuple[int, int] = (4, 2)) -> Path:
    """Write the model's checkpoint (about 1 MB, float32, no tokenizer) into ``folder`` and return it.

    ``heads``: of queries, and of keys and values; tensor parallelism over n ranks needs multiples of n.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=VOCABULARY - 1,
        bos_token_id=VOCABULARY - 2,
        torch_dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # Scores of a few units, so that attention picks tokens out instead of averaging over all of them.
                weight.normal_(0, 0.35 if "q_proj" in name or "k_proj" in name else 0.2)
    model.save_pretrained(folder)
    return folder
