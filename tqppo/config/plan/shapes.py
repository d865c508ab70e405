"""The shape of a model: from its config.json, from a table of well-known names, or from the [model] section.

It takes neither network nor transformers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tqppo.config.plan.known import KNOWN
from tqppo.config.plan.model_shape import Experts, LatentAttention, ModelShape
from tqppo.untrusted import read_file, read_json

TINY_VOCABULARY, TINY_CONTEXT = 264, 4096
MAX_CONFIG_BYTES, MAX_REF_BYTES = 1 << 24, 4096
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def shape_of(path: str) -> ModelShape | None:
    """The shape of a folder with a config.json, of a hub name in the cache, or of a known name; otherwise None."""
    folder = Path(os.path.expanduser(path))
    folder = folder if os.path.isfile(folder / "config.json") else cached_folder(path) or folder
    if os.path.isfile(folder / "config.json"):
        try:
            values = read_json(folder / "config.json", MAX_CONFIG_BYTES)
        except (ValueError, OSError):
            return None
        return from_json(values) if isinstance(values, dict) else None
    name = path.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"-v\d+(\.\d+)?$|-\d{4}$", "", name)
    plain = re.sub(r"-(instruct|base|chat|it|coder|hf)\b", "", name)
    return KNOWN.get(re.sub(r"^meta-(llama-3\.)", r"\1", plain))


def cached_folder(name: str) -> Path | None:
    """The folder of a hub name in the cache of `huggingface_hub`, if its config.json was downloaded before."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name in (".", ".."):
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = read_file(repository / "refs" / "main", MAX_REF_BYTES).decode().strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def from_json(values: Mapping[str, object]) -> ModelShape | None:
    """The shape in a model's config.json; None unless it is a decoder with the usual names."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = [number for name in needed if (number := _int(values, name))]
    experts = _experts(values)
    intermediate = _int(values, "intermediate_size") or (experts.intermediate if experts else 0)
    if len(sizes) < len(needed) or not intermediate:
        return None
    hidden, layers, heads, vocabulary = sizes
    return ModelShape(
        hidden,
        layers,
        heads,
        _int(values, "num_key_value_heads") or heads,
        intermediate,
        vocabulary,
        _int(values, "max_position_embeddings"),
        tied=bool(values.get("tie_word_embeddings", False)),
        head_dim=_int(values, "head_dim"),
        source="config.json",
        experts=experts,
        latent=_latent(values),
    )


def _experts(values: Mapping[str, object]) -> Experts | None:
    """The experts of Mixtral, Qwen, OLMoE, gpt-oss (`num_local_experts`, `num_experts`) and DeepSeek."""
    count = next((n for name in EXPERT_COUNTS if (n := _int(values, name))), 0)
    if count < 2:
        return None
    width = _int(values, "moe_intermediate_size") or _int(values, "intermediate_size")
    shared = _int(values, "shared_expert_intermediate_size") or _int(values, "n_shared_experts") * width
    layers = _int(values, "num_hidden_layers")
    only_dense = values.get("mlp_only_layers")
    dense = _int(values, "first_k_dense_replace") + (len(only_dense) if isinstance(only_dense, list) else 0)
    every = _int(values, "decoder_sparse_step") or _int(values, "moe_layer_freq") or 1
    dense = min(dense, layers)
    dense += (layers - dense) - (layers - dense) // every
    per_token = _int(values, "num_experts_per_tok") or _int(values, "experts_per_token") or 1
    return Experts(count, per_token, width, shared, dense)


def _latent(values: Mapping[str, object]) -> LatentAttention | None:
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = [_int(values, name) for name in names]
    return LatentAttention(*sizes) if all(sizes[1:]) else None


def _int(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else 0  # no size of a model is negative


def tiny_shape(*, hidden: int, layers: int, heads: int, tied: bool) -> ModelShape:
    """The shape of the model that `tqppo.tiny.model` makes."""
    return ModelShape(
        hidden, layers, heads, heads, 3 * hidden, TINY_VOCABULARY, TINY_CONTEXT, tied=tied, source="the [model] section"
    )
