"""The flat layout that all maths uses, and the ways into and out of it.

The response tokens of some rows lie one row after another in one vector [N]; `lengths` [B] says how many each
row has, and `mask` [N], true where a token counts. Nothing is padded, and a sum per row has a fixed order.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


class _Blank(torch.autograd.Function):
    """Bits instead of torch.where: ten times faster on a CPU; instead of a product: 0 · NaN is NaN."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return (values.contiguous().view(keep.dtype) & keep).view(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (grads[0].contiguous().view(keep.dtype) & keep).view(grads[0].dtype), None


@overload
def blank(mask: Tensor, values: Tensor, /) -> Tensor: ...
@overload
def blank(mask: Tensor, values: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
def blank(mask: Tensor, /, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Each tensor [N] with 0 where `mask` is false, in value and in gradient, whatever stood there (NaN too)."""
    keeps = {bits: bit_mask(mask, bits) for bits in {_BITS[each.dtype] for each in tensors}}
    blanked = tuple(_Blank.apply(each, keeps[_BITS[each.dtype]]) for each in tensors)
    return blanked[0] if len(blanked) == 1 else blanked


def blank_(mask: Tensor, values: Tensor) -> Tensor:
    """`blank` in place, for a tensor of the caller's own that has no gradient."""
    bits = _BITS[values.dtype]
    values.view(bits).bitwise_and_(bit_mask(mask, bits))
    return values


class _MaskedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return (values.contiguous().view(keep.dtype) & keep).view(values.dtype).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (keep & grads[0].view(keep.dtype)).view(grads[0].dtype), None


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count; what stands elsewhere reaches neither value nor gradient."""
    return _MaskedSum.apply(values, bit_mask(mask, _BITS[values.dtype]))


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None


def differentiable(source: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """`value` [N] as a function of `source` [N] with the derivative `slope` [N], both worked out without a graph.

    One tensor is kept for the backward instead of the dozen of a chain of elementwise steps.
    """
    return _ByHand.apply(source, value, slope)


def bit_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits set where `mask` is true, none elsewhere, as an integer `dtype`."""
    return mask.to(dtype).neg_()


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return _repeat(rows, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return _segment_sum(grads[0], lengths), None


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return _segment_sum(values, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return _repeat(grads[0], lengths), None


def _repeat(rows: Tensor, lengths: Tensor) -> Tensor:
    if rows.device.type == "cpu" and rows.dtype != torch.bfloat16:
        # numpy copies runs; torch gathers through an index of N entries: six times slower.
        return torch.from_numpy(np.repeat(rows.numpy(), lengths.numpy()))
    return torch.repeat_interleave(rows, lengths)


def _segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    # Not index_add: slower, and on a GPU its order, hence its rounding, varies from run to run.
    return torch.segment_reduce(values.contiguous(), "sum", lengths=lengths, initial=0.0, unsafe=True)


def row_ids(lengths: Tensor) -> Tensor:
    """Which row each token belongs to: [N] int64."""
    return torch.repeat_interleave(lengths)


def per_token(rows: Tensor, lengths: Tensor) -> Tensor:
    """One value per row [B] → one per token [N]."""
    return _PerToken.apply(rows, lengths)


def row_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each row's tokens: [N] → [B]; 0 for a row without tokens."""
    return _RowSum.apply(values, lengths)


def row_max(values: Tensor, lengths: Tensor, *, initial: float) -> Tensor:
    """Largest of each row's tokens: [N] → [B]; `initial` where there is none larger."""
    return torch.segment_reduce(values, "max", lengths=lengths, initial=initial, unsafe=True)


def row_counts(mask: Tensor, lengths: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many tokens count in each row: [B], as `dtype`."""
    upto = first_sums(mask.cumsum(0, dtype=torch.int32), lengths.cumsum(0))
    return upto.diff(prepend=upto.new_zeros(1)).to(dtype)


def first_sums(cumulative: Tensor, counts: Tensor) -> Tensor:
    """Σ of the first `counts` entries, from their cumulative sums [N]; the same shape as `counts`."""
    if not cumulative.numel():
        return cumulative.new_zeros(counts.shape)
    return cumulative[(counts - 1).clamp(min=0)] * (counts > 0)


def row_mean(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each row that count: [B]; 0 for a row without any."""
    counts = row_counts(mask, lengths, values.dtype)
    return row_sum(blank(mask, values), lengths) / counts.clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count; 0 if none does."""
    return masked_sum(values, mask) / torch.count_nonzero(mask).clamp(min=1)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, shift: bool = True) -> Tensor:
    """(x − mean) / √(variance + 1e-8) over the tokens that count, 0 elsewhere; variance unbiased. No gradient.

    `shift=False` keeps the mean. One token alone has no spread: it stays as it is.
    """
    count = int(torch.count_nonzero(mask))
    if count < 2:
        return blank(mask, values)
    mean = masked_sum(values, mask) / count
    centred = blank_(mask, values - mean)
    scaled = centred.mul_(torch.rsqrt(torch.dot(centred, centred) / (count - 1) + 1e-8))
    return scaled if shift else blank_(mask, scaled + mean)


def from_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """A `torch.jagged` tensor [B, ragged, …] → values [N, …] and lengths [B]."""
    return nested.values(), nested.offsets().diff()  # type: ignore[attr-defined]


def to_nested(values: Tensor, lengths: Tensor) -> Tensor:
    """Values [N, …] and lengths [B] → a `torch.jagged` tensor [B, ragged, …], also when all lengths agree."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def to_padded(values: Tensor, lengths: Tensor, *, fill: float = 0.0, width: int | None = None) -> Tensor:
    """Flat [N, …] → padded [B, T, …], each row from the left; T is `width`, or the longest row."""
    width = width if width is not None else int(lengths.max()) if lengths.numel() else 0
    padded = values.new_full((lengths.numel(), width, *values.shape[1:]), fill)
    padded[_inside(lengths, width)] = values
    return padded


def from_padded(padded: Tensor, lengths: Tensor) -> Tensor:
    """Padded [B, T, …] → flat [N, …]: the first `lengths` entries of each row."""
    return padded[_inside(lengths, padded.shape[1])]


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]  # [B, T]


def response_positions(sequence_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Where in a flat model output [ΣS] the response tokens are scored: [ΣR] int64.

    The output at position t scores token t + 1, so a row's response is at [S − R − 1, S − 1) of its S positions.
    """
    ends = sequence_lengths.cumsum(0) - 1  # [B], behind the last position that scores a response token
    first_in_flat = response_lengths.cumsum(0) - response_lengths  # [B]
    shift = per_token(ends - response_lengths - first_in_flat, response_lengths)  # [ΣR]
    return shift + torch.arange(shift.numel(), device=shift.device)


def response_slice(outputs: Tensor, sequence_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """The part of a flat model output [ΣS, …] that scores the responses: [ΣR, …]."""
    return outputs[response_positions(sequence_lengths, response_lengths)]
