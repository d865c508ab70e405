"""Sessions as episodes of tokens: where rewards fall, and sums along an episode. Flat layout, see `layout`.

An episode is all rows of a session, one after another; the reward comes at its last token that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tqppo.algorithms.groups import RowGroups
from tqppo.algorithms.layout import apply_mask, first_sums, per_token, row_sum
from tqppo.algorithms.scan import discounted_sums


def session_reward(reward: Tensor, rows: RowGroups, penalty: Tensor, mask: Tensor) -> Tensor:
    """`reward` [B] minus the penalty [N] (β·KL) summed over all rows of the session; valid on final rows."""
    per_row = row_sum(apply_mask(mask, penalty), rows.lengths) * ~rows.is_padding  # [B]
    return reward - session_totals(per_row, rows)


def session_totals(values: Tensor, rows: RowGroups) -> Tensor:
    """Sum of `values` [B] over all rows of the session, for each row: [B]."""
    ids, which = torch.unique(rows.session, return_inverse=True)
    return values.new_zeros(ids.numel()).index_add_(0, which, values)[which]


def episode_lengths(rows: RowGroups) -> Tensor:
    """Number of tokens of each session in the flat vector, in the order of the rows: [S]."""
    ids, which, counts = torch.unique_consecutive(rows.session, return_inverse=True, return_counts=True)
    assert ids.numel() == torch.unique(ids).numel(), "rows of a session must follow one another"
    return rows.lengths.new_zeros(counts.numel()).index_add_(0, which, rows.lengths)


def token_rewards(
    reward: Tensor, rows: RowGroups, mask: Tensor, penalty: Tensor | None = None, *, credit_rows: bool = False
) -> Tensor:
    """The final row's reward [B] at the session's last token that counts, minus `penalty` [N] on every token: [N].

    With `credit_rows` every row's reward comes at its own last token that counts, or at an earlier one of its session
    if it has none.
    """
    episodes = episode_lengths(rows)
    _, which = torch.unique_consecutive(rows.session, return_inverse=True)
    paid = ~rows.is_padding if credit_rows else rows.is_final & ~rows.is_padding
    seen = mask.cumsum(0, dtype=torch.int32)
    upto = first_sums(seen, rows.lengths.cumsum(0)[paid])
    found = upto > first_sums(seen, (episodes.cumsum(0) - episodes)[which[paid]])
    last = torch.searchsorted(seen, upto[found])  # where the count of the row's end is reached
    tokens = reward.new_zeros(mask.numel()).index_add_(0, last, reward[paid][found])
    return tokens if penalty is None else tokens - apply_mask(mask, penalty)


def rewards_to_go(rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + γ G_{t+1} over the tokens of each episode that count: [N]."""
    grid = Grid.of(mask, lengths)
    return grid.read(discounted_sums(grid.fill(rewards), gamma))


@dataclass(frozen=True, slots=True)
class Grid:
    """The tokens that count as [episodes, longest], each row from the left: masked tokens take no step."""

    cell: Tensor  # [N], each token's index in the flattened grid, counted from 1; 0 where the mask is false
    shape: tuple[int, int]

    @staticmethod
    def of(mask: Tensor, lengths: Tensor) -> Grid:
        ends = lengths.cumsum(0)
        seen = mask.cumsum(0)
        before = first_sums(seen, ends - lengths)
        width = int((first_sums(seen, ends) - before).max()) if lengths.numel() else 0
        first = torch.arange(lengths.numel(), device=mask.device) * width - before
        return Grid(torch.where(mask, seen + per_token(first, lengths), 0), (lengths.numel(), width))

    def fill(self, values: Tensor) -> Tensor:
        """[N] → [episodes, longest], 0 where a row has ended."""
        cells = values.new_zeros(self.shape[0] * self.shape[1] + 1)
        return cells.scatter_(0, self.cell, values)[1:].view(self.shape)

    def read(self, grid: Tensor) -> Tensor:
        """[episodes, longest] → [N], 0 where the mask is false."""
        return torch.nn.functional.pad(grid.reshape(-1), (1, 0)).index_select(0, self.cell)
