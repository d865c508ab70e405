"""Group estimators: one reward per session → one scalar per row, carried directly, never through a mask.

A session counts once, no matter how many rows (trajectories) it has: by its final row's reward or, where rows are
credited one by one, by all of them together.
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
class Units:
    """What a batch is compared by: its sessions or, with credit for each row, its rows. [U] in float64.

    The units of a session share a weight of 1, so that a session counts once however many rows it has.
    """

    rewards: Tensor
    num_tokens: Tensor  # that count
    session: Tensor  # dense numbers
    group: Tensor  # dense numbers
    weight: Tensor  # 1 / units of the session
    of_row: Tensor  # [B], the unit of each row; meaningless on padding
    num_groups: int

    def total(self, values: Tensor) -> Tensor:
        """Sum over the group's units, for each unit: [U] → [U]."""
        return values.new_zeros(self.num_groups).index_add_(0, self.group, values)[self.group]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group's sessions, for each unit: [U] → [U]."""
        return self.total(self.weight * values)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the group's units, for each unit: [U] → [U]."""
        lowest = values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce_(0, self.group, values, "amax")[self.group]

    def session_mean(self, values: Tensor) -> Tensor:
        """Mean over the session's units, for each unit: [U] → [U]."""
        sums = torch.zeros_like(values).index_add_(0, self.session, self.weight * values)
        return sums[self.session]

    @property
    def size(self) -> Tensor:
        """Number of sessions of the group: [U]."""
        return self.sum(torch.ones_like(self.weight)).round()

    @property
    def centred(self) -> Tensor:
        """Reward minus the group's mean over sessions: [U]."""
        return self.rewards - self.sum(self.rewards) / self.size

    @property
    def std(self) -> Tensor:
        """Standard deviation of the group's rewards, with n − 1; 0 for a single session: [U]."""
        # Deviations first, then squares: Σr² − n·mean² loses all digits in groups of nearly equal rewards.
        return (self.sum(self.centred.square()) / (self.size - 1).clamp(min=1)).sqrt()

    @property
    def is_single(self) -> Tensor:
        """Whether a unit's session is the only one of its group: [U] bool."""
        return self.size == 1

    @property
    def is_flat(self) -> Tensor:
        """Whether several sessions of one group all have the same reward: [U] bool."""
        return ~self.is_single & (self.max(self.rewards) == -self.max(-self.rewards))


def units_of(reward: Tensor, rows: RowGroups, num_tokens: Tensor | None = None, *, credit_rows: bool = False) -> Units:
    """The units of a batch. `reward` [B] is read on final rows, or with `credit_rows` on all.

    `num_tokens` [B] (default 1) is summed over the rows of a unit.
    """
    assert reward.is_floating_point(), f"rewards are {reward.dtype}, advantages would be rounded"
    real = ~rows.is_padding
    ids, session_of_real = torch.unique(rows.session[real], return_inverse=True)
    finals = rows.is_final[real]
    is_one_each = bool((torch.bincount(session_of_real[finals], minlength=ids.numel()) == 1).all())
    assert is_one_each, "each session needs exactly one final row"
    # One row stands for each unit: the final one of a session, or every row.
    shown = torch.ones_like(finals) if credit_rows else finals
    session = session_of_real[shown]
    number = torch.arange(session.numel(), device=session.device)
    of_real = number if credit_rows else torch.empty_like(ids).index_copy_(0, session, number)[session_of_real]
    of_row = torch.zeros_like(rows.session)
    of_row[real] = of_real
    group_ids, group = torch.unique(rows.group[real][shown], return_inverse=True)
    counts = torch.ones_like(of_real) if num_tokens is None else num_tokens[real]
    zeros = torch.zeros(session.numel(), dtype=torch.float64, device=reward.device)
    return Units(
        rewards=reward[real][shown].double(),
        num_tokens=zeros.index_add_(0, of_real, counts.double()),
        session=session,
        group=group,
        weight=1.0 / torch.bincount(session, minlength=ids.numel()).double()[session],
        of_row=of_row,
        num_groups=group_ids.numel(),
    )


def grpo(units: Units) -> Tensor:
    """(r − mean) / (std + 1e-6)."""
    return units.centred / (units.std + EPSILON)


def dr_grpo(units: Units) -> Tensor:
    """r − mean (Dr.GRPO)."""
    return units.centred


def grpo_passk(units: Units) -> Tensor:
    """(best − second best) / (std + 1e-6) for the group's best session, 0 for all others; a tie gets 0 (pass@k)."""
    rewards = units.session_mean(units.rewards)
    best = units.max(rewards)
    is_best = rewards == best
    second = units.max(torch.where(is_best, -torch.inf, rewards))
    is_only = is_best & (units.sum(is_best.double()).round() == 1) & second.isfinite()
    return torch.where(is_only, best - second, 0.0) / (units.std + EPSILON)


def rloo(units: Units) -> Tensor:
    """r − mean of the group's other sessions (leave one out); n/(n − 1)·(r − mean) where a session is one unit."""
    others = units.sum(units.rewards) - units.session_mean(units.rewards)
    return units.rewards - others / (units.size - 1).clamp(min=1)


def opo(units: Units) -> Tensor:
    """r − Σ length·r / Σ length, length in tokens (OPO)."""
    length = units.num_tokens
    return units.rewards - units.total(length * units.rewards) / units.total(length).clamp(min=1)


def gpg(units: Units) -> Tensor:
    """α(r − mean), α = sessions / sessions with a reward other than 0 (GPG)."""
    earning = (units.weight * (units.rewards != 0)).sum()
    alpha = units.weight.sum() / torch.where(earning > 0, earning, 1.0)
    return alpha * units.centred


GroupEstimator = Callable[[Units], Tensor]

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
    credit_rows: bool = False,
) -> GroupEstimate:
    """One scalar per row. A group of equal rewards gets 0; a single session gets 0 or, with "raw", its reward.

    A session's scalar goes to all its rows; with `credit_rows` each row is compared by its own reward.
    """
    units = units_of(reward, rows, num_tokens, credit_rows=credit_rows)
    scalars = _scalars(estimator, units, single_session)
    return _on_rows(scalars, units, rows, units.is_flat, reward.dtype)


def estimate_gdpo(
    terms: Sequence[tuple[float, Tensor]],
    rows: RowGroups,
    *,
    single_session: SingleSession = "zero",
    credit_rows: bool = False,
) -> GroupEstimate:
    """Σ weight · GRPO(term) over the (weight, term [B]) pairs of a reward: each is normalised by itself (GDPO)."""
    each = [(weight, units_of(term, rows, credit_rows=credit_rows)) for weight, term in terms]
    scalars = torch.stack([weight * _scalars(grpo, units, single_session) for weight, units in each]).sum(0)
    is_flat = torch.stack([units.is_flat for _, units in each]).all(0)
    return _on_rows(scalars, each[0][1], rows, is_flat, terms[0][1].dtype)


def _scalars(estimator: GroupEstimator, units: Units, single_session: SingleSession) -> Tensor:
    """The estimator's scalar of each unit, replaced where its group compares nothing: [U]."""
    scalars = torch.where(units.is_flat, 0.0, estimator(units))
    return torch.where(units.is_single, units.rewards if single_session == "raw" else 0.0, scalars)


def _on_rows(scalars: Tensor, units: Units, rows: RowGroups, is_flat: Tensor, dtype: torch.dtype) -> GroupEstimate:
    if not units.num_groups:
        empty = torch.zeros(rows.session.numel(), dtype=dtype, device=scalars.device)
        return GroupEstimate(empty, {"training/groups": 0.0})
    per_group = units.weight / units.size  # adds up to 1 over the units of a group
    metrics = {
        "training/groups": float(units.num_groups),
        "training/groups_single_session": float((per_group * units.is_single).sum().round()),
        "training/groups_zero_variance": float((per_group * is_flat).sum().round()),
    }
    return GroupEstimate(scalars.to(dtype)[units.of_row] * ~rows.is_padding, metrics)
