"""The optimal token baseline (OTB): a baseline per step instead of one per group. Flat layout, see `layout`."""

from __future__ import annotations

import torch
from torch import Tensor

from tqppo.algorithms.episodes import Grid
from tqppo.algorithms.layout import apply_mask
from tqppo.algorithms.scan import discounted_sums


def optimal_token_baseline(
    rewards: Tensor, weights: Tensor, mask: Tensor, lengths: Tensor, group: Tensor, *, skips_masked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages and rewards to go [N], and which episodes [S] have another one in their group to compare with.

    The advantage is the reward to go minus, at each step, the group's mean reward to go, weighted by how uncertain
    each path was so far: `weights` [N] is 1 − 2π + Σπ² of each token, summed along the episode. `lengths` and `group`
    [S] describe the episodes. They are compared at the same position, or with `skips_masked` at the same number of
    tokens that count (for episodes with observations). An episode without a token that counts is not compared with.
    """
    grid = Grid.of(mask if skips_masked else torch.ones_like(mask), lengths)
    counts = grid.fill(mask.to(rewards.dtype))  # [S, T], 1 where a token counts
    reward, weight = grid.fill(apply_mask(mask, rewards)), grid.fill(apply_mask(mask, weights))
    to_go = discounted_sums(reward, 1.0)
    baseline, is_compared = _baseline(to_go, weight.cumsum(1) * counts, counts, group)
    advantages = apply_mask(mask, grid.read(to_go - baseline))
    return advantages, apply_mask(mask, grid.read(to_go)), is_compared


def _baseline(to_go: Tensor, weights: Tensor, counts: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Σ weight · reward to go / Σ weight over the group's episodes at each step [S, T]; which are compared [S].

    The baseline is 0 where nothing is compared: for an episode alone in its group, and beyond the end of all others.
    """
    groups, which = torch.unique(group, return_inverse=True)
    total = weights.new_zeros(groups.numel(), weights.shape[1])
    top = total.index_add(0, which, weights * to_go)
    baseline = (top / (total.index_add(0, which, weights) + 1e-8))[which]
    lengths = counts.sum(1)
    is_longest = lengths == _group_max(lengths, which, groups.numel())
    is_only_longest = is_longest & (torch.bincount(which, weights=is_longest.double())[which] == 1)
    second = _group_max(torch.where(is_longest, 0.0, lengths), which, groups.numel())
    is_tail = is_only_longest[:, None] & (torch.arange(weights.shape[1], device=group.device) >= second[:, None])
    is_compared = torch.bincount(which, weights=(lengths > 0).double())[which] > 1
    return torch.where(is_tail | ~is_compared[:, None], 0.0, baseline), is_compared


def _group_max(values: Tensor, which: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).scatter_reduce(0, which, values, "amax")[which]
