"""Credit finer than a session: what each row, or each turn of a row, earns. Flat layout, see `layout`.

Turns are handled as rows: a row of three turns becomes three shorter rows of the same session, so that every estimator
works on both. The flat token vectors stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tqppo.algorithms.episodes import Grid, episode_lengths
from tqppo.algorithms.groups import RowGroups
from tqppo.algorithms.layout import apply_mask, row_sum
from tqppo.algorithms.scan import discounted_sums

Credit = Literal["session", "trajectory", "turn"]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of all rows, one row's after another: K of them. Padding rows have none, every other row has one."""

    counts: Tensor  # [B] int64
    ends: Tensor  # [K] int64, response tokens up to the end of the turn
    rewards: Tensor  # [K]
    anchors: Tensor  # [K] int64, equal where sessions of one group are in the same state


@dataclass(frozen=True, slots=True)
class TurnRows:
    """Turns as rows: [U], one for each turn and one for each padding row."""

    rows: RowGroups
    rewards: Tensor
    anchors: Tensor
    of: Tensor  # the row that each was a part of


def turn_rows(turns: Turns, rows: RowGroups) -> TurnRows:
    """Cut every row at the ends of its turns; tokens after the last end belong to the last turn."""
    has_turns = turns.counts > 0
    assert torch.equal(has_turns, ~rows.is_padding), "every row but padding needs its turns, and padding has none"
    counts = turns.counts.clamp(min=1)
    of = torch.repeat_interleave(counts)  # [U]
    is_given = ~rows.is_padding[of]
    last = counts.cumsum(0) - 1  # [B], the last turn of each row
    ends = torch.zeros_like(of)
    ends[is_given] = turns.ends
    ends[last] = rows.lengths
    begins = ends.roll(1)
    begins[last - counts + 1] = 0
    lengths = ends - begins
    assert bool((lengths >= 0).all()), "the ends of a row's turns must ascend and lie within its response"
    is_final = torch.zeros_like(is_given)
    is_final[last] = rows.is_final
    rewards = turns.rewards.new_zeros(of.numel())
    rewards[is_given] = turns.rewards
    anchors = torch.zeros_like(of)
    anchors[is_given] = turns.anchors
    cut = RowGroups(rows.group[of], rows.session[of], is_final, rows.is_padding[of], lengths)
    return TurnRows(cut, rewards, anchors, of)


def penalised_rows(reward: Tensor, rows: RowGroups, penalty: Tensor | None, mask: Tensor) -> Tensor:
    """`reward` [B] of each row minus the penalty [N] (β·KL) of its own tokens."""
    return reward if penalty is None else reward - row_sum(apply_mask(mask, penalty), rows.lengths)


def returns_of_rows(reward: Tensor, rows: RowGroups, *, gamma: float) -> Tensor:
    """G_k = r_k + γ G_{k+1} over the rows of each session, which follow one another in order: [B]."""
    episode_lengths(rows)  # asserts the order
    _, counts = torch.unique_consecutive(rows.session, return_counts=True)
    grid = Grid.of(torch.ones_like(rows.is_final), counts)
    return grid.read(discounted_sums(grid.fill(reward), gamma))


def anchor_groups(rows: RowGroups, anchors: Tensor) -> RowGroups:
    """Rows regrouped by state: a group is the rows of one prompt with one anchor, each compared on its own."""
    _, group = torch.unique(torch.stack([rows.group, anchors], 1), dim=0, return_inverse=True)
    alone = torch.arange(group.numel(), device=group.device)
    return RowGroups(group, alone, torch.ones_like(rows.is_final), rows.is_padding, rows.lengths)
