"""Discounted sums from the right, without a Python loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def discounted_sums(values: Tensor, decay: float) -> Tensor:
    """s_t = x_t + decay · s_{t+1} along the last dimension: [B, T] → [B, T], for 0 ≤ decay ≤ 1.

    Each block of 64 steps is one product with a triangular matrix of powers; the carry goes from block to block.
    """
    rows, width = values.shape
    blocks = -(-width // _BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * _BLOCK - width)).view(rows, blocks, _BLOCK)
    steps = torch.arange(_BLOCK, device=values.device)
    ahead = steps[:, None] - steps  # [from, to], the distance from target to source
    powers = torch.where(ahead >= 0, torch.full((), decay, dtype=torch.float64) ** ahead.clamp(min=0), 0.0)
    sums = padded @ powers.to(values.dtype)  # [B, blocks, 64], each block by itself
    reach = (torch.full((), decay, dtype=torch.float64) ** (_BLOCK - steps)).to(values.dtype)  # [64]
    for block in range(blocks - 2, -1, -1):
        sums[:, block] += sums[:, block + 1, :1] * reach
    return sums.view(rows, blocks * _BLOCK)[:, :width]
