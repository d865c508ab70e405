"""What a model's architecture does, tried on a clone: one narrow layer with random weights, in float32 on the CPU.

The model itself cannot be asked: it may be in parts on several ranks, and its attention kernel may need a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

VOCABULARY, WIDTH = 64, 64  # of a clone
NARROW = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
PER_LAYER = ("layer_types", "mlp_only_layers")  # lists with an entry for each layer, or with numbers of layers


def attention_kinds(config: Any) -> set[str]:
    """The kinds of attention of the layers: "full_attention", "sliding_attention", …"""
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [window])


def clone(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and hidden size with one layer and a small vocabulary."""
    small = copy.deepcopy(model.config)
    text: Any = small.get_text_config()
    text.num_hidden_layers = 1
    text.vocab_size = VOCABULARY
    text.pad_token_id = None
    for name in NARROW:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, WIDTH)
    for name in PER_LAYER:
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:1] if name == "layer_types" else [])
    kernel = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        make: Any = type(model)._from_config
        small_model: PreTrainedModel = make(small, attn_implementation=kernel, dtype=torch.float32)
    small_model.eval()  # type: ignore[no-untyped-call]
    return small_model
