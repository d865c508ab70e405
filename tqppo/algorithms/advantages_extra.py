"""Estimators that no preset uses: pass@k, GDPO, the optimal token baseline. For your own trainers."""

from __future__ import annotations

import torch
from torch import Tensor

from tqppo.algorithms.advantages import Estimate, Grid, to_tokens
from tqppo.algorithms.groups import EPSILON, Estimator, Rows, Sessions, estimate_groups, grpo
from tqppo.algorithms.layout import blank, whiten
from tqppo.algorithms.scan import discounted_sums


def grpo_passk(sessions: Sessions, *, divide_by_std: bool = True) -> Tensor:
    """The group's one best session gets (best − second best) / (std + 1e-6), all others 0 (pass@k); ties get 0."""
    best = sessions.max(sessions.rewards)
    is_best = sessions.rewards == best
    second = sessions.max(torch.where(is_best, -torch.inf, sessions.rewards))
    is_only = is_best & (sessions.sum(is_best.double()) == 1) & second.isfinite()
    scalars = torch.where(is_only, best - second, 0.0)
    return scalars / (sessions.std + EPSILON) if divide_by_std else scalars


def gdpo(rewards: Tensor, weights: Tensor, mask: Tensor, rows: Rows, *, estimator: Estimator = grpo) -> Tensor:
    """GRPO on each reward dimension by itself, weighted sum, whitened over the tokens: [B, D], [D] → [N] (GDPO)."""
    each = [estimate_groups(estimator, column, rows).scalars for column in rewards.unbind(1)]
    return whiten(to_tokens(torch.stack(each, 1) @ weights, mask, rows.lengths), mask)


def optimal_token_baseline(
    rewards: Tensor, weights: Tensor, mask: Tensor, rows: Rows, *, by_turn: bool = False, zero_tail: bool = True
) -> Estimate:
    """Reward to go minus a baseline per step: the group's mean, weighted by how uncertain each path was so far.

    `weights` [N] is 1 − 2π + Σπ² of each token, summed along the row. Rows of a group are compared at the same
    position, or with `by_turn` at the same number of tokens that count (for rows with observations). `zero_tail`:
    where one row is longer than all others its baseline is 0. Each row is its own episode.
    """
    grid = Grid.of(mask if by_turn else torch.ones_like(mask), rows.lengths)
    counts = grid.fill(mask.to(rewards.dtype))  # 1 where a token counts
    reward, weight = (grid.fill(blank(mask, each)) for each in (rewards, weights))
    to_go = discounted_sums(reward, 1.0)
    baseline = _baseline(to_go, weight.cumsum(1) * counts, counts, rows.group, zero_tail)
    return Estimate(blank(mask, grid.read(to_go - baseline)), blank(mask, grid.read(to_go)))


def _baseline(to_go: Tensor, weights: Tensor, counts: Tensor, group: Tensor, zero_tail: bool) -> Tensor:
    """Σ weight · reward to go / Σ weight over the group's rows at each step: [B, T]; 0 for a row alone in its group."""
    groups, which = torch.unique(group, return_inverse=True)
    total = weights.new_zeros(groups.numel(), weights.shape[1])
    top = total.index_add(0, which, weights * to_go)
    baseline = (top / (total.index_add(0, which, weights) + 1e-8))[which]
    lengths = counts.sum(1)
    longest = _group_max(lengths, which, groups.numel())
    is_longest = lengths == longest
    is_alone = torch.bincount(which)[which] == 1
    if zero_tail:
        is_only = torch.bincount(which, weights=is_longest.double())[which] == 1
        second = _group_max(torch.where(is_longest, 0.0, lengths), which, groups.numel())
        tail = torch.arange(weights.shape[1], device=group.device) >= second[:, None]
        baseline = torch.where((is_longest & is_only)[:, None] & tail, 0.0, baseline)
    return torch.where(is_alone[:, None], 0.0, baseline)


def _group_max(values: Tensor, which: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).scatter_reduce(0, which, values, "amax")[which]
