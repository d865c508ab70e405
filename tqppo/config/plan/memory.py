"""Estimates the memory of a process from its model's shape; each part has its formula.

N parameters, E of them outside of the layers, L layers, h hidden size, m width of a token's MLP, V vocabulary, T tokens
of a micro-batch, r ranks that share a copy, b bytes per number of the computation. Trained parameters, their gradients
and AdamW's moments are float32 and sharded over the ranks; frozen weights have the computation's type.
tests/config/plan/track.py measures the same with fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqppo.config.plan.model_shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_AT_ONCE = 2**26  # most logits of one chunk of a training worker
LOGIT_BYTES = 20  # of a logit with its loss, entropy and gradients


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

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP gathers layers: not for a single rank in float32."""
        return self.ranks > 1 or self.dtype != "float32"


def training_memory(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """The memory of one rank at its peak."""
    moments = [_in_a_layer(shape, how), _in_the_head(shape, how)]
    if how.learns:
        moments += [_reducing(shape, how), _in_the_optimizer(shape, how)]
    return [*states(shape, how), *max(moments, key=total)]


def states(shape: ModelShape, how: Training) -> Iterator[MemoryPart]:
    """What a rank holds between its stages too: weights, gradients, optimizer."""
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


def _in_a_layer(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """The backward of a layer, or its forward if nothing is learned."""
    b, outer, layer, head = BYTES[how.dtype], shape.outer_parameters, shape.layer_parameters, _head(shape, how)
    parts = []
    if how.is_sharded:
        formula = f"b·(E + 2·layer) = {b} × ({outer:,} + 2 × {layer:,})"
        parts.append(MemoryPart("gathered weights", b * (outer + 2 * layer), formula))
    if how.learns and not how.lora_rank:
        reduced = 4 * layer if how.is_sharded else 0
        formula = f"b·V·h + 4·layer = {b} × {head:,} + {reduced:,}"
        parts.append(MemoryPart("new gradients", b * head + reduced, formula))
    width = shape.active_intermediate / shape.hidden
    at_work = 6 * width + 12 if how.learns else 3 * width + 5
    return [*parts, _activations(shape, how, at_work)]


def _in_the_head(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """The output layer and the loss, a chunk of tokens at a time."""
    b, outer, head = BYTES[how.dtype], shape.outer_parameters, _head(shape, how)
    count = min(how.micro_batch_tokens * shape.vocabulary, LOGITS_AT_ONCE) if how.has_logits else 0
    parts = []
    if how.is_sharded:
        parts.append(MemoryPart("gathered weights", b * outer, f"b·E = {b} × {outer:,}"))
    if how.learns and not how.lora_rank:
        parts.append(MemoryPart("new gradients", 2 * b * head, f"2·b·V·h = 2 × {b} × {head:,}"))
    parts.append(_activations(shape, how, 3))
    each = LOGIT_BYTES if how.learns else 4 + b
    parts.append(MemoryPart("logits", each * count, f"{each}·min(T·V, 2²⁶) = {each} × {count:,}"))
    return parts


def _reducing(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """The end of the backward: gradients of embedding and output layer are added up over the ranks."""
    if not how.is_sharded or how.lora_rank:
        return []
    b, outer = BYTES[how.dtype], shape.outer_parameters
    return [MemoryPart("new gradients", (4 + b) * outer, f"(4+b)·E = {4 + b} × {outer:,}")]


def _in_the_optimizer(shape: ModelShape, how: Training) -> list[MemoryPart]:
    """AdamW's step computes a tensor as large as the parameters."""
    count = adapter_parameters(shape, how.lora_rank) if how.lora_rank else shape.parameters
    return [MemoryPart("optimizer's step", 4 * count / how.ranks, f"4·N/r = 4 × {count:,} / {how.ranks}")]


def _activations(shape: ModelShape, how: Training, at_work: float) -> MemoryPart:
    """What layers keep for the backward pass, and `at_work` of the current one: numbers per token and hidden unit."""
    t, h, b, layers = how.micro_batch_tokens, shape.hidden, BYTES[how.dtype], shape.layers
    kept = 0.0
    if how.learns:
        kept = layers if how.checkpointing else layers * saved_per_layer(shape)
    formula = f"({kept:.0f} kept + {at_work:.0f})·T·h·b = {kept + at_work:.1f} × {t} × {h} × {b}"
    return MemoryPart("activations", (kept + at_work) * t * h * b, formula)


def saved_per_layer(shape: ModelShape) -> float:
    """Numbers per token and hidden unit that a layer without checkpointing keeps for its backward pass."""
    return 4 * shape.active_intermediate / shape.hidden + 12


def _head(shape: ModelShape, how: Training) -> int:
    return shape.vocabulary * shape.hidden if how.has_logits else 0


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of LoRA on every linear layer: rank × (inputs + outputs) each."""
    h, q, kv, m = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.intermediate
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + m))


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of a whole model in this type."""
    return shape.parameters * BYTES[dtype]


def cache_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token's keys and values."""
    return shape.cached_numbers * BYTES[dtype]


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


def total(parts: Sequence[MemoryPart]) -> float:
    return sum(part.num_bytes for part in parts)
