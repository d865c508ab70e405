"""Group estimators: one reward per session → one scalar per row, carried directly, never through a mask.

A session counts once, by its final row's reward, however many rows (trajectories) it left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Fallback = Literal["zero", "raw"]
Metrics = dict[str, float]

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Rows:
    """Who belongs to whom: [B] each. Rows of a session are in trajectory order, one after another."""

    group: Tensor  # int64, one number per prompt
    session: Tensor  # int64, one number per session, different between groups
    is_final: Tensor  # bool, the last trajectory of its session
    is_padding: Tensor  # bool
    lengths: Tensor  # int64, response tokens


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """`scalars` [B], 0 on padding; `informative` [B] is false where the group has nothing to compare."""

    scalars: Tensor
    informative: Tensor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class _Sessions:
    """The sessions of a batch: rewards and groups [S] in float64, and where rows find theirs [B]."""

    rewards: Tensor
    group: Tensor  # [S], dense
    of_row: Tensor  # [B], the row's session; real rows only are meaningful
    num_groups: int

    def per_group(self, values: Tensor) -> Tensor:
        """Sum over the group's sessions, for each session: [S] → [S]."""
        return values.new_zeros(self.num_groups).index_add_(0, self.group, values)[self.group]


def _sessions(reward: Tensor, rows: Rows) -> _Sessions:
    real = ~rows.is_padding
    ids, of_real = torch.unique(rows.session[real], return_inverse=True)
    of_row = torch.zeros_like(rows.session)
    of_row[real] = of_real
    finals = rows.is_final & real
    where = of_row[finals]  # [S], which session each final row closes
    assert where.numel() == ids.numel() == torch.unique(where).numel(), "each session needs exactly one final row"
    rewards = torch.empty(ids.numel(), dtype=torch.float64, device=reward.device)
    rewards[where] = reward[finals].double()
    group = torch.empty_like(ids)
    group[where] = rows.group[finals]
    groups, group = torch.unique(group, return_inverse=True)
    return _Sessions(rewards, group, of_row, groups.numel())


def _group_estimate(
    reward: Tensor, rows: Rows, sessions: _Sessions, scalars: Tensor, fallbacks: tuple[Fallback, Fallback]
) -> GroupEstimate:
    """Replace the scalars [S] of groups that compare nothing, count those groups, and hand each row its scalar."""
    size = sessions.per_group(torch.ones_like(sessions.rewards))
    low = torch.full((sessions.num_groups,), torch.inf, dtype=torch.float64, device=reward.device)
    low.scatter_reduce_(0, sessions.group, sessions.rewards, "amin")
    equal = sessions.per_group((sessions.rewards != low[sessions.group]).double()) == 0
    single, flat = size == 1, (size > 1) & equal
    for where, fallback in zip((single, flat), fallbacks, strict=True):
        scalars = torch.where(where, sessions.rewards if fallback == "raw" else 0.0, scalars)
    real = ~rows.is_padding
    if not sessions.rewards.numel():
        return GroupEstimate(torch.zeros_like(reward), torch.zeros_like(real), {})
    metrics = {
        "training/groups": float(sessions.num_groups),
        "training/groups_single_session": float(single.sum()),
        "training/groups_zero_variance": float((flat / size).sum().round()),
    }
    informative = ~(single | flat)[sessions.of_row] & real
    return GroupEstimate((scalars[sessions.of_row] * real).to(reward.dtype), informative, metrics)


def _centre(sessions: _Sessions) -> tuple[Tensor, Tensor]:
    """Each session's reward minus its group's mean, and the size of its group: [S], [S]."""
    size = sessions.per_group(torch.ones_like(sessions.rewards))
    return sessions.rewards - sessions.per_group(sessions.rewards) / size, size


def grpo(
    reward: Tensor, rows: Rows, *, single_session: Fallback = "zero", zero_variance: Fallback = "zero"
) -> GroupEstimate:
    """(r − mean) / (std + 1e-6) over the group's sessions, std with n − 1. `reward` [B]: the final rows' are read."""
    sessions = _sessions(reward, rows)
    centred, size = _centre(sessions)
    # Deviations first, then squares: Σr² − n·mean² loses all digits in groups of nearly equal rewards.
    std = (sessions.per_group(centred.square()) / (size - 1).clamp(min=1)).sqrt()
    return _group_estimate(reward, rows, sessions, centred / (std + EPSILON), (single_session, zero_variance))


def dr_grpo(
    reward: Tensor, rows: Rows, *, single_session: Fallback = "zero", zero_variance: Fallback = "zero"
) -> GroupEstimate:
    """r − mean over the group's sessions (Dr.GRPO)."""
    sessions = _sessions(reward, rows)
    centred, _ = _centre(sessions)
    return _group_estimate(reward, rows, sessions, centred, (single_session, zero_variance))


def rloo(
    reward: Tensor, rows: Rows, *, single_session: Fallback = "zero", zero_variance: Fallback = "zero"
) -> GroupEstimate:
    """r − mean of the group's other sessions = n/(n − 1)·(r − mean) (leave one out)."""
    sessions = _sessions(reward, rows)
    centred, size = _centre(sessions)
    scalars = centred * size / (size - 1).clamp(min=1)
    return _group_estimate(reward, rows, sessions, scalars, (single_session, zero_variance))


def opo(
    reward: Tensor,
    rows: Rows,
    *,
    num_tokens: Tensor,
    single_session: Fallback = "zero",
    zero_variance: Fallback = "zero",
) -> GroupEstimate:
    """r − Σ length·r / Σ length over the group (OPO); a session's length is `num_tokens` [B] summed over its rows."""
    sessions = _sessions(reward, rows)
    real = ~rows.is_padding
    length = torch.zeros_like(sessions.rewards)
    length.index_add_(0, sessions.of_row[real], num_tokens[real].double())
    total = sessions.per_group(length)
    baseline = sessions.per_group(length * sessions.rewards) / total.clamp(min=1)
    return _group_estimate(reward, rows, sessions, sessions.rewards - baseline, (single_session, zero_variance))


def gpg(
    reward: Tensor, rows: Rows, *, single_session: Fallback = "zero", zero_variance: Fallback = "zero"
) -> GroupEstimate:
    """α(r − mean), α = sessions / sessions with a reward other than 0 (GPG)."""
    sessions = _sessions(reward, rows)
    centred, _ = _centre(sessions)
    alpha = sessions.rewards.numel() / torch.count_nonzero(sessions.rewards).clamp(min=1)
    return _group_estimate(reward, rows, sessions, alpha * centred, (single_session, zero_variance))


GROUP_ESTIMATORS: dict[str, Callable[..., GroupEstimate]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
}
