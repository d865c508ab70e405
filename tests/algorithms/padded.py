"""Flat layout ↔ padded [B, T], for comparisons with padded code."""

from __future__ import annotations

import torch
from torch import Tensor


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
    return torch.arange(width) < lengths[:, None]  # [B, T]
