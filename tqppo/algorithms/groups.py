"""Group estimators: one reward per session → one scalar per row, carried directly, never through a mask.

A session counts once, by its final row's reward, no matter how many rows (trajectories) it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tqppo.protocols import Metrics

SingleSession = Literal["zero", "raw"]

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The group and session of each row: [B] each. Token estimators need the rows of a session in order, adjacent."""

    group: Tensor  # int64, one number per prompt
    session: Tensor  # int64, one number per session, different between groups
    is_final: Tensor  # bool, the last trajectory of its session
    is_padding: Tensor  # bool
    lengths: Tensor  # int64, response tokens


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of a batch, [S] in float64, and the session of each row, [B]."""

    rewards: Tensor
    num_tokens: Tensor  # that count, over all rows of the session
    group: Tensor  # dense numbers
    of_row: Tensor  # [B]; meaningless on padding
    num_groups: int
    size: Tensor  # sessions of the group
    centred: Tensor  # reward minus the group's mean

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group's sessions, for each session: [S] → [S]."""
        return values.new_zeros(self.num_groups).index_add_(0, self.group, values)[self.group]

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the group's sessions, for each session: [S] → [S]."""
        lowest = values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce_(0, self.group, values, "amax")[self.group]

    @property
    def std(self) -> Tensor:
        """Standard deviation of the group's rewards, with n − 1; 0 for a single session: [S]."""
        # Deviations first, then squares: Σr² − n·mean² loses all digits in groups of nearly equal rewards.
        return (self.sum(self.centred.square()) / (self.size - 1).clamp(min=1)).sqrt()

    @property
    def is_single(self) -> Tensor:
        """Whether a session is the only one of its group: [S] bool."""
        return self.size == 1

    @property
    def is_flat(self) -> Tensor:
        """Whether several sessions of one group all have the same reward: [S] bool."""
        return ~self.is_single & (self.max(self.rewards) == -self.max(-self.rewards))


def sessions_of(reward: Tensor, rows: RowGroups, num_tokens: Tensor | None = None) -> Sessions:
    """`reward` [B] is read on final rows; `num_tokens` [B] (default 1) is summed over the rows of a session."""
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


def grpo_passk(sessions: Sessions) -> Tensor:
    """(best − second best) / (std + 1e-6) for the group's best session, 0 for all others; a tie gets 0 (pass@k)."""
    best = sessions.max(sessions.rewards)
    is_best = sessions.rewards == best
    second = sessions.max(torch.where(is_best, -torch.inf, sessions.rewards))
    is_only = is_best & (sessions.sum(is_best.double()) == 1) & second.isfinite()
    return torch.where(is_only, best - second, 0.0) / (sessions.std + EPSILON)


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


GroupEstimator = Callable[[Sessions], Tensor]

GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
}


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """`scalars` [B], 0 on padding, and counts of the groups that compare nothing."""

    scalars: Tensor
    metrics: Metrics


def estimate_groups(
    estimator: GroupEstimator,
    reward: Tensor,
    rows: RowGroups,
    *,
    num_tokens: Tensor | None = None,
    single_session: SingleSession = "zero",
) -> GroupEstimate:
    """One scalar per row. A group of equal rewards gets 0; a single session gets 0 or, with "raw", its reward."""
    sessions = sessions_of(reward, rows, num_tokens)
    scalars = _scalars(estimator, sessions, single_session)
    return _on_rows(scalars, sessions, rows, sessions.is_flat, reward.dtype)


def estimate_gdpo(
    terms: Sequence[tuple[float, Tensor]], rows: RowGroups, *, single_session: SingleSession = "zero"
) -> GroupEstimate:
    """Σ weight · GRPO(term) over the (weight, term [B]) pairs of a reward: each is normalised by itself (GDPO)."""
    each = [(weight, sessions_of(term, rows)) for weight, term in terms]
    scalars = torch.stack([weight * _scalars(grpo, sessions, single_session) for weight, sessions in each]).sum(0)
    is_flat = torch.stack([sessions.is_flat for _, sessions in each]).all(0)
    return _on_rows(scalars, each[0][1], rows, is_flat, terms[0][1].dtype)


def _scalars(estimator: GroupEstimator, sessions: Sessions, single_session: SingleSession) -> Tensor:
    """The estimator's scalar of each session, replaced where its group compares nothing: [S]."""
    scalars = torch.where(sessions.is_flat, 0.0, estimator(sessions))
    return torch.where(sessions.is_single, sessions.rewards if single_session == "raw" else 0.0, scalars)


def _on_rows(
    scalars: Tensor, sessions: Sessions, rows: RowGroups, is_flat: Tensor, dtype: torch.dtype
) -> GroupEstimate:
    if not sessions.num_groups:
        empty = torch.zeros(rows.session.numel(), dtype=dtype, device=scalars.device)
        return GroupEstimate(empty, {"training/groups": 0.0})
    metrics = {
        "training/groups": float(sessions.num_groups),
        "training/groups_single_session": float(sessions.is_single.sum()),
        "training/groups_zero_variance": float((is_flat / sessions.size).sum().round()),
    }
    return GroupEstimate(scalars.to(dtype)[sessions.of_row] * ~rows.is_padding, metrics)
