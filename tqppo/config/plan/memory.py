"""Memory per process, estimated from a model's shape, each part with the formula that gave it.

N parameters, L layers, h hidden size, V vocabulary, T tokens of a micro-batch, r ranks, b bytes per number of the
computation. Parameters that learn, their gradients and AdamW's two moments are float32 and sharded over the
ranks; frozen weights have the computation's type. Activations are the least certain part: take them as ± 30 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqppo.config.plan.shapes import Shape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_AT_ONCE = 2**26  # how many logits the training workers hold in one chunk
SAVED_PER_LAYER = 17  # numbers per token and hidden unit that a layer keeps for its backward pass


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    num_bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class Training:
    """How a role's model is held: what learns, in what type, over how many ranks."""

    ranks: int
    micro_batch_tokens: int
    dtype: str
    learns: bool = True
    checkpointing: bool = False
    lora_rank: int = 0
    has_logits: bool = True


def training_memory(shape: Shape, how: Training) -> list[Part]:
    """Of one rank."""
    return [*_weights(shape, how), *_activations(shape, how)]


def _weights(shape: Shape, how: Training) -> Iterator[Part]:
    n, r, b = shape.parameters, how.ranks, BYTES[how.dtype]
    if how.learns and not how.lora_rank:
        yield Part("weights", 4 * n / r, f"4·N/r = 4 × {n:,} / {r}")
        yield Part("gradients", 4 * n / r, f"4·N/r = 4 × {n:,} / {r}")
        yield Part("optimizer", 8 * n / r, f"8·N/r = 8 × {n:,} / {r}")
    else:
        yield Part("weights", b * n / r, f"b·N/r = {b} × {n:,} / {r}")
    if how.learns and how.lora_rank:
        a = adapter_parameters(shape, how.lora_rank)
        yield Part("adapter", 16 * a / r, f"16·A/r = 16 × {a:,} / {r} (weights, gradients, optimizer)")
    if r > 1:
        layer = n // (shape.layers + 1)
        yield Part("gathered layers", 2 * b * layer, f"2·b·N/(L+1) = 2 × {b} × {layer:,}")


def _activations(shape: Shape, how: Training) -> Iterator[Part]:
    t, h, b, layers = how.micro_batch_tokens, shape.hidden, BYTES[how.dtype], shape.layers
    k = SAVED_PER_LAYER
    if how.learns and how.checkpointing:
        yield Part("activations", (layers + k) * t * h * b, f"(L+{k})·T·h·b = ({layers}+{k}) × {t} × {h} × {b}")
    elif how.learns:
        yield Part("activations", layers * k * t * h * b, f"L·{k}·T·h·b = {layers} × {k} × {t} × {h} × {b}")
    else:
        yield Part("activations", k * t * h * b, f"{k}·T·h·b = {k} × {t} × {h} × {b} (one layer at a time)")
    if how.has_logits:
        count = min(t * shape.vocabulary, LOGITS_AT_ONCE)
        copies = 2 if how.learns else 1
        formula = f"4·{copies}·min(T·V, 2²⁶) = {4 * copies} × {count:,}"
        yield Part("logits", 4 * copies * count, formula)


def adapter_parameters(shape: Shape, rank: int) -> int:
    """LoRA on every linear layer: rank × (inputs + outputs) each."""
    h, q, kv, m = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.intermediate
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + m))


def engine_memory(shape: Shape, *, dtype: str, tensor_parallel: int, rows: int, context: int) -> list[Part]:
    """Of one GPU of a replica that holds `rows` sequences of the longest kind at once."""
    b, n, tp = BYTES[dtype], shape.parameters, tensor_parallel
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_size * b
    cache = f"2·L·kv·d·b·tokens/tp = {per_token:,} × {rows} × {context} / {tp}"
    return [
        Part("weights", b * n / tp, f"b·N/tp = {b} × {n:,} / {tp}"),
        Part("KV cache", per_token * rows * context / tp, cache),
    ]


def total(parts: list[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
