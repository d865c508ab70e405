"""Computation over the vocabulary a chunk of tokens at a time, so that [tokens × vocabulary] never exists whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PerToken = tuple[Tensor | None, ...]  # results with one entry per token; None: not asked for


def in_chunks(compute: Callable[..., PerToken], columns: Sequence[Tensor], size: int) -> PerToken:
    """`compute(*columns)` over `size` tokens at a time, its results joined: [N, …] in, [N] out.

    With gradients, several chunks are computed again in the backward pass instead of being kept.
    """
    if len(columns[0]) <= size:
        return compute(*columns)
    # The backward of torch.split is one concatenation; each slice would allocate a whole buffer.
    pieces = zip(*(torch.split(column, size) for column in columns), strict=True)
    if torch.is_grad_enabled():
        found = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    else:
        found = [compute(*piece) for piece in pieces]
    return tuple(_joined(column) for column in zip(*found, strict=True))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
