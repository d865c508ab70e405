"""The shape of a model: from its config.json, from a table of well-known names, or from the [model] section.

It holds what parameter counts, memory and context lengths need, and takes neither network nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

TINY_VOCABULARY, TINY_CONTEXT = 264, 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: attention with grouped key-value heads, a gated MLP, two norms a layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False
    head_dim: int = 0  # 0: hidden / heads
    source: str = "known name"

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Weights of matrices and norms; biases are left out (under 0.02 % of a 7B model)."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden


_KNOWN: dict[str, ModelShape] = {
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 8960, 151_936, 32_768, tied=True),
    "qwen2.5-3b": ModelShape(2048, 36, 16, 2, 11_008, 151_936, 32_768, tied=True),
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 18_944, 152_064, 32_768),
    "qwen2.5-14b": ModelShape(5120, 48, 40, 8, 13_824, 152_064, 32_768),
    "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 27_648, 152_064, 32_768),
    "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 29_568, 152_064, 32_768),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 3072, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 6144, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 9728, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 12_288, 151_936, 40_960, head_dim=128),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 17_408, 151_936, 40_960, head_dim=128),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 25_600, 151_936, 40_960, head_dim=128),
    "llama-3.2-1b": ModelShape(2048, 16, 32, 8, 8192, 128_256, 131_072, tied=True, head_dim=64),
    "llama-3.2-3b": ModelShape(3072, 28, 24, 8, 8192, 128_256, 131_072, tied=True, head_dim=128),
    "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.1-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 131_072),
    "llama-3.3-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 131_072),
    "meta-llama-3-8b": ModelShape(4096, 32, 32, 8, 14_336, 128_256, 8192),
    "meta-llama-3-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 8192),
    "smollm2-135m": ModelShape(576, 30, 9, 3, 1536, 49_152, 8192, tied=True),
    "smollm2-360m": ModelShape(960, 32, 15, 5, 2560, 49_152, 8192, tied=True),
    "smollm2-1.7b": ModelShape(2048, 24, 32, 32, 8192, 49_152, 8192, tied=True),
    "mistral-7b": ModelShape(4096, 32, 32, 8, 14_336, 32_768, 32_768),
}
_ALIASES = {
    "qwen2.5-math-1.5b": replace(_KNOWN["qwen2.5-1.5b"], context=4096),
    "qwen2.5-math-7b": replace(_KNOWN["qwen2.5-7b"], context=4096),
    "deepseek-r1-distill-qwen-1.5b": replace(_KNOWN["qwen2.5-1.5b"], context=131_072, tied=False),
    "deepseek-r1-distill-qwen-7b": replace(_KNOWN["qwen2.5-7b"], context=131_072),
    "deepseek-r1-distill-llama-8b": _KNOWN["llama-3.1-8b"],
}


def shape_of(path: str) -> ModelShape | None:
    """The shape of a folder with a config.json or of a known name such as Qwen/Qwen2.5-7B-Instruct; otherwise None."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        try:
            return from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (ValueError, OSError):
            return None
    name = path.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"-v\d+(\.\d+)?$|-\d{4}$", "", name)
    plain = re.sub(r"-(instruct|base|chat|it|coder|hf)\b", "", name)
    return {**_KNOWN, **_ALIASES}.get(re.sub(r"^meta-(llama-3\.)", r"\1", plain))


def from_json(values: Mapping[str, object]) -> ModelShape | None:
    """The shape in a model's config.json; None unless it is a dense decoder with the usual names."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = [number for name in needed if isinstance(number := values.get(name), int)]
    if len(sizes) < len(needed) or values.get("num_experts"):
        return None
    hidden, layers, heads, intermediate, vocabulary = sizes
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
    )


def _int(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def tiny_shape(*, hidden: int, layers: int, heads: int, tied: bool) -> ModelShape:
    """The shape of the model that `tqppo.tiny.model` makes."""
    return ModelShape(
        hidden, layers, heads, heads, 3 * hidden, TINY_VOCABULARY, TINY_CONTEXT, tied=tied, source="the [model] section"
    )
