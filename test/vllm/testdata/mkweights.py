"""Writes a copy of a Qwen2 model with weights under which the greedy answer depends on the whole prompt.

The weights that vLLM draws with --load-format dummy give the same few tokens whatever the prompt is, so that a
wrong KV cache cannot be seen in a text. Usage: mkweights.py SOURCE TARGET, two folders."""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file

SEED = 7
source, target = (pathlib.Path(a) for a in sys.argv[1:3])
shutil.copytree(source, target, dirs_exist_ok=True)
config = json.loads((source / "config.json").read_text())
hidden, inner = config["hidden_size"], config["intermediate_size"]
head = config["head_dim"]
queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
draw = torch.Generator().manual_seed(SEED)


def normal(spread, *shape):
    return spread * torch.randn(*shape, generator=draw)


def linear(spread, *shape):
    """Of a wider model smaller weights, so that activations are as large as in the tiny one."""
    return normal(spread * (128 / hidden) ** 0.5, *shape)


weights = {
    "model.embed_tokens.weight": normal(1.0, config["vocab_size"], hidden),
    "model.norm.weight": torch.ones(hidden),
}
# Attention weighs more than the rest, so that tokens far back move the answer.
for layer in range(config["num_hidden_layers"]):
    parts = {
        "self_attn.q_proj.weight": linear(0.12, queries, hidden),
        "self_attn.k_proj.weight": linear(0.12, keys, hidden),
        "self_attn.v_proj.weight": linear(0.2, keys, hidden),
        "self_attn.o_proj.weight": linear(0.6, hidden, queries),
        "self_attn.q_proj.bias": torch.zeros(queries),
        "self_attn.k_proj.bias": torch.zeros(keys),
        "self_attn.v_proj.bias": torch.zeros(keys),
        "mlp.gate_proj.weight": linear(0.1, inner, hidden),
        "mlp.up_proj.weight": linear(0.1, inner, hidden),
        "mlp.down_proj.weight": linear(0.1, hidden, inner),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }
    weights.update({f"model.layers.{layer}.{name}": value for name, value in parts.items()})

# The answer is of plain letters and spaces, and never ends by itself: every other token scores zero.
output = linear(0.3, config["vocab_size"], hidden)
space = "\u0120"  # as the tokenizer writes it
for text, number in json.loads((source / "tokenizer.json").read_text())["model"]["vocab"].items():
    if not all(c == space or c.isascii() and c.isalpha() for c in text):
        output[number] = 0
weights["lm_head.weight"] = output
save_file(weights, target / "model.safetensors")
