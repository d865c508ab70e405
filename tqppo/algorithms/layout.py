"""The flat layout that all the maths uses: sums, means and masks over it.

The response tokens of some rows lie one row after another in one vector [N]. `lengths` [B] is the number of tokens of
each row; `mask` [N] is true where a token counts. Nothing is padded, and a sum per row has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_mask(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where `mask` is true, 0 elsewhere, in value and in gradient. All have one shape.

    A product would not do: 0 · NaN is NaN.
    """
    return torch.where(mask, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count; other tokens influence neither value nor gradient."""
    return apply_mask(mask, values).sum()


def per_token(rows: Tensor, lengths: Tensor) -> Tensor:
    """Repeat each row's value for each of its tokens: [B] → [N]."""
    return torch.repeat_interleave(rows, lengths)


def row_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each row's tokens: [N] → [B]; 0 for a row without tokens."""
    # On a GPU the order of index_add, hence its rounding, varies from run to run.
    return torch.segment_reduce(values.contiguous(), "sum", lengths=lengths, initial=0.0, unsafe=True)


def row_max(values: Tensor, lengths: Tensor, *, initial: float) -> Tensor:
    """Largest of each row's tokens and `initial`: [N] → [B]."""
    return torch.segment_reduce(values, "max", lengths=lengths, initial=initial, unsafe=True)


def row_counts(mask: Tensor, lengths: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Number of tokens that count in each row: [B], as `dtype`."""
    upto = first_sums(mask.cumsum(0, dtype=torch.int32), lengths.cumsum(0))
    return upto.diff(prepend=upto.new_zeros(1)).to(dtype)


def first_sums(cumulative: Tensor, counts: Tensor) -> Tensor:
    """Sum of the first `counts` entries of a vector, given its cumulative sums [N]; shaped like `counts`."""
    if not cumulative.numel():
        return cumulative.new_zeros(counts.shape)
    return cumulative[(counts - 1).clamp(min=0)] * (counts > 0)


def row_mean(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each row that count: [B]; 0 for a row without any."""
    counts = row_counts(mask, lengths, values.dtype)
    return row_sum(apply_mask(mask, values), lengths) / counts.clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count; 0 if none does."""
    return masked_sum(values, mask) / torch.count_nonzero(mask).clamp(min=1)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / √(variance + 1e-8) over the tokens that count, 0 elsewhere; variance unbiased. No gradient.

    A single token has no variance and is returned unchanged.
    """
    count = int(torch.count_nonzero(mask))
    if count < 2:
        return apply_mask(mask, values)
    mean = masked_sum(values, mask) / count
    centred = apply_mask(mask, values - mean)
    return centred * torch.rsqrt(torch.dot(centred, centred) / (count - 1) + 1e-8)


def to_nested(values: Tensor, lengths: Tensor) -> Tensor:
    """Values [N, …] and lengths [B] → a `torch.jagged` tensor [B, ragged, …], even when all lengths are equal."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def response_positions(sequence_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Positions in a flat model output [ΣS] that score the response tokens: [ΣR] int64.

    The output at position t scores token t + 1, so a row's response is at [S − R − 1, S − 1) of its S positions.
    """
    ends = sequence_lengths.cumsum(0) - 1  # [B], one past the last position that scores a response token
    first_in_flat = response_lengths.cumsum(0) - response_lengths  # [B]
    shift = per_token(ends - response_lengths - first_in_flat, response_lengths)  # [ΣR]
    return shift + torch.arange(shift.numel(), device=shift.device)
