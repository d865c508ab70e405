"""Estimates the memory of a process from its model's shape; each part has its formula.

N parameters, L layers, h hidden size, V vocabulary, T tokens of a micro-batch, r ranks, b bytes per number of the
computation. Trained parameters, their gradients and AdamW's two moments are float32 and sharded over the ranks;
frozen weights have the computation's type. The estimate of activations is good to about 30 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqppo.config.plan.shapes import ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_AT_ONCE = 2**26  # largest number of logits that a training worker holds at once
SAVED_PER_LAYER = 17  # numbers per token and hidden unit that a layer keeps for its backward pass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class Training:
    """How a role holds its model: over how many ranks, in which type, and what of it is trained."""

    ranks: int
    micro_batch_tokens: int
    dtype: str
    learns: bool = True
    checkpointing: bool = False
    lora_rank: int = 0
    has_logits: bool = True


def training_memory(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """The memory of one rank."""
    return [*_weights(shape, how), *_activations(shape, how)]


def _weights(shape: ModelShape, how: Training) -> Iterator[MemoryPart]:
    n, r, b = shape.parameters, how.ranks, BYTES[how.dtype]
    if how.learns and not how.lora_rank:
        yield MemoryPart("weights", 4 * n / r, f"4·N/r = 4 × {n:,} / {r}")
        yield MemoryPart("gradients", 4 * n / r, f"4·N/r = 4 × {n:,} / {r}")
        yield MemoryPart("optimizer", 8 * n / r, f"8·N/r = 8 × {n:,} / {r}")
    else:
        yield MemoryPart("weights", b * n / r, f"b·N/r = {b} × {n:,} / {r}")
    if how.learns and how.lora_rank:
        a = adapter_parameters(shape, how.lora_rank)
        yield MemoryPart("adapter", 16 * a / r, f"16·A/r = 16 × {a:,} / {r} (weights, gradients, optimizer)")
    if r > 1:
        layer = n // (shape.layers + 1)
        yield MemoryPart("gathered layers", 2 * b * layer, f"2·b·N/(L+1) = 2 × {b} × {layer:,}")


def _activations(shape: ModelShape, how: Training) -> Iterator[MemoryPart]:
    t, h, b, layers = how.micro_batch_tokens, shape.hidden, BYTES[how.dtype], shape.layers
    k = SAVED_PER_LAYER
    if how.learns and how.checkpointing:
        yield MemoryPart("activations", (layers + k) * t * h * b, f"(L+{k})·T·h·b = ({layers}+{k}) × {t} × {h} × {b}")
    elif how.learns:
        yield MemoryPart("activations", layers * k * t * h * b, f"L·{k}·T·h·b = {layers} × {k} × {t} × {h} × {b}")
    else:
        yield MemoryPart("activations", k * t * h * b, f"{k}·T·h·b = {k} × {t} × {h} × {b} (one layer at a time)")
    if how.has_logits:
        count = min(t * shape.vocabulary, LOGITS_AT_ONCE)
        copies = 2 if how.learns else 1
        formula = f"4·{copies}·min(T·V, 2²⁶) = {4 * copies} × {count:,}"
        yield MemoryPart("logits", 4 * copies * count, formula)


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of LoRA on every linear layer: rank × (inputs + outputs) each."""
    h, q, kv, m = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.intermediate
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + m))


def cache_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token's keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * BYTES[dtype]


def engine_memory(shape: ModelShape, *, dtype: str, tensor_parallel: int, rows: int, context: int) -> list[MemoryPart]:
    """The memory of one GPU of a replica that holds `rows` sequences of full length at once."""
    b, n, tp = BYTES[dtype], shape.parameters, tensor_parallel
    per_token = cache_bytes(shape, dtype)
    cache = f"2·L·kv·d·b·tokens/tp = {per_token:,} × {rows} × {context} / {tp}"
    return [
        MemoryPart("weights", b * n / tp, f"b·N/tp = {b} × {n:,} / {tp}"),
        MemoryPart("KV cache", per_token * rows * context / tp, cache),
    ]


def prefix_memory(shape: ModelShape, *, dtype: str, budget: int, sessions: int, context: int) -> list[MemoryPart]:
    """The caches that a replica keeps of this many sessions between their turns."""
    per_token = cache_bytes(shape, dtype)
    formula = f"min(budget, 2·L·kv·d·b·tokens) = min({budget:,}, {per_token:,} × {sessions} × {context})"
    return [MemoryPart("kept prefixes", min(budget, per_token * sessions * context), formula)] if budget else []


def total(parts: list[MemoryPart]) -> float:
    return sum(part.num_bytes for part in parts)


def size(num_bytes: float) -> str:
    """Bytes in the largest fitting unit, as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
