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
    """Who belongs to whom: [B] each. Token estimators want a session's rows in order, one after another."""

    group: Tensor  # int64, one number per prompt
    session: Tensor  # int64, one number per session, different between groups
    is_final: Tensor  # bool, the last trajectory of its session
    is_padding: Tensor  # bool
    lengths: Tensor  # int64, response tokens


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of a batch, [S] in float64, and where each row finds its own, [B]."""

    rewards: Tensor
    num_tokens: Tensor  # that count, over all rows of the session
    group: Tensor  # dense numbers
    of_row: Tensor  # [B]; means nothing on padding
    num_groups: int
    size: Tensor  # sessions of the group
    centred: Tensor  # reward minus the group's mean

    def sum(self, values: Tensor) -> Tensor:
        """Over the group's sessions, for each session: [S] → [S]."""
        return values.new_zeros(self.num_groups).index_add_(0, self.group, values)[self.group]

    def max(self, values: Tensor) -> Tensor:
        """Over the group's sessions, for each session: [S] → [S]."""
        lowest = values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce_(0, self.group, values, "amax")[self.group]

    @property
    def std(self) -> Tensor:
        """Of the group's rewards, with n − 1; 0 for a session alone: [S]."""
        # Deviations first, then squares: Σr² − n·mean² loses all digits in groups of nearly equal rewards.
        return (self.sum(self.centred.square()) / (self.size - 1).clamp(min=1)).sqrt()


def sessions_of(reward: Tensor, rows: Rows, num_tokens: Tensor | None = None) -> Sessions:
    """`reward` [B] is read on final rows, `num_tokens` [B] (1 if left out) summed over the rows of the session."""
    assert reward.is_floating_point(), f"rewards are {reward.dtype}, advantages would be rounded"
    real = ~rows.is_padding
    ids, of_real = torch.unique(rows.session[real], return_inverse=True)
    of_row = torch.zeros_like(rows.session)
    of_row[real] = of_real
    finals = rows.is_final & real
    closes = of_row[finals]  # [S], the session that each final row belongs to
    is_one_each = bool((torch.bincount(closes, minlength=ids.numel()) == 1).all())
    assert is_one_each, "each session needs exactly one final row"
    rewards = torch.empty(ids.numel(), dtype=torch.float64, device=reward.device)
    rewards[closes] = reward[finals].double()
    group = torch.empty_like(ids)
    group[closes] = rows.group[finals]
    _, group, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    size = sizes[group].double()
    means = rewards.new_zeros(sizes.numel()).index_add_(0, group, rewards) / sizes
    counts = torch.ones_like(of_real) if num_tokens is None else num_tokens[real]
    tokens = torch.zeros_like(rewards).index_add_(0, of_real, counts.double())
    return Sessions(rewards, tokens, group, of_row, sizes.numel(), size, rewards - means[group])


def grpo(sessions: Sessions) -> Tensor:
    """(r − mean) / (std + 1e-6)."""
    return sessions.centred / (sessions.std + EPSILON)


def dr_grpo(sessions: Sessions) -> Tensor:
    """r − mean (Dr.GRPO)."""
    return sessions.centred


def rloo(sessions: Sessions) -> Tensor:
    """r − mean of the group's other sessions = n/(n − 1)·(r − mean) (leave one out)."""
    return sessions.centred * sessions.size / (sessions.size - 1).clamp(min=1)


def opo(sessions: Sessions) -> Tensor:
    """r − Σ length·r / Σ length, length in tokens (OPO)."""
    length = sessions.num_tokens
    return sessions.rewards - sessions.sum(length * sessions.rewards) / sessions.sum(length).clamp(min=1)


def gpg(sessions: Sessions) -> Tensor:
    """α(r − mean), α = sessions / sessions with a reward other than 0 (GPG)."""
    alpha = sessions.rewards.numel() / torch.count_nonzero(sessions.rewards).clamp(min=1)
    return alpha * sessions.centred


Estimator = Callable[[Sessions], Tensor]

GROUP_ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo, "gpg": gpg}


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """`scalars` [B], 0 on padding; `informative` [B] is false where the group has nothing to compare."""

    scalars: Tensor
    informative: Tensor
    metrics: Metrics


def estimate_groups(
    estimator: Estimator,
    reward: Tensor,
    rows: Rows,
    *,
    num_tokens: Tensor | None = None,
    single_session: Fallback = "zero",
) -> GroupEstimate:
    """Each row's scalar. Groups of equal rewards get 0; groups of one session get 0 or, by `single_session`, their
    reward as it is. Both are counted.
    """
    sessions = sessions_of(reward, rows, num_tokens)
    size = sessions.size
    is_single = size == 1
    is_flat = ~is_single & (sessions.max(sessions.rewards) == -sessions.max(-sessions.rewards))
    scalars = estimator(sessions)
    scalars = torch.where(is_single, sessions.rewards if single_session == "raw" else 0.0, scalars)
    scalars = torch.where(is_flat, 0.0, scalars)
    real = ~rows.is_padding
    if not sessions.num_groups:
        return GroupEstimate(torch.zeros_like(reward), torch.zeros_like(real), {"training/groups": 0.0})
    on_rows = (scalars.to(reward.dtype)[sessions.of_row]).mul_(real)
    informative = ~(is_single | is_flat)[sessions.of_row] & real
    metrics = {
        "training/groups": float(sessions.num_groups),
        "training/groups_single_session": float(is_single.sum()),
        "training/groups_zero_variance": float((is_flat / size).sum().round()),
    }
    return GroupEstimate(on_rows, informative, metrics)
