"""A small language model, made from the config with no download.

The folder it writes is an ordinary Hugging Face folder: every engine and worker loads it like any
other model. Its tokenizer has one token per byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from tqppo import space
from tqppo.tiny.tokenizer import byte_tokenizer

VOCABULARY = 264  # 256 bytes and the special tokens, rounded up to a multiple of 8


class TinyShape(TypedDict, total=False):
    """The arguments of `write_tiny_model` that shape the model."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    tie_embeddings: bool


def tiny_config(
    *, family: str, hidden_size: int, num_layers: int, num_heads: int, tie_embeddings: bool, max_tokens: int = 4096
) -> PretrainedConfig:
    tokenizer = byte_tokenizer()
    return AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=tie_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def write_tiny_model(
    folder: str | Path,
    *,
    family: str = "llama",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """A fresh model and its tokenizer, the same bytes for the same arguments."""
    config = tiny_config(
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        tie_embeddings=tie_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32)
    save(model, Path(folder))
    byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's weights and config. `OutOfSpace` if they do not fit, which the safetensors library cannot say."""
    folder.mkdir(parents=True, exist_ok=True)
    space.require(folder, sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()))
    model.save_pretrained(folder)
