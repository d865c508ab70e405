"""From rows to micro-batches: flat columns, cuts by token budget, and tensors for a forward without padding waste.

The last token of a row needs no forward: the output at position t scores token t + 1, so a row of S
tokens takes S − 1 positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tqppo.workers.compute import shared_prompts as trees
from tqppo.workers.compute.shared_prompts import spans

LAYOUTS = ("trimmed", "packed")


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows laid end to end. Response columns share one layout: [ΣR], row i at `response_starts[i]`."""

    tokens: Tensor  # [ΣS]
    starts: Tensor  # [B] int64, where a row's tokens begin
    lengths: Tensor  # [B] int64, S
    response_starts: Tensor  # [B]
    response_lengths: Tensor  # [B], R
    response: Mapping[str, Tensor]  # name → [ΣR, …]
    row: Mapping[str, Tensor]  # name → [B, …]

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(columns: Mapping[str, Any]) -> Rows:
        """From columns as the queue gives them: jagged nested tensors, and dense ones for values per row."""
        tokens = columns["tokens"]
        mask = columns["response_mask"]
        starts, lengths = _extents(tokens)
        response_starts, response_lengths = _extents(mask)
        assert bool((lengths > response_lengths).all()), "a row needs at least one prompt token"
        response = {name: c.values() for name, c in columns.items() if _is_ragged(c) and name != "tokens"}
        total = int(response_lengths.sum())
        wrong = {name: len(values) for name, values in response.items() if len(values) != total}
        assert not wrong, f"response columns of other lengths than response_mask's {total}: {wrong}"
        row = {name: c for name, c in columns.items() if isinstance(c, Tensor) and not _is_ragged(c)}
        return Rows(tokens.values(), starts, lengths, response_starts, response_lengths, response, row)

    def jagged(self, values: Tensor) -> Tensor:
        """A response column [ΣR] as a jagged nested tensor."""
        offsets = torch.cat([self.response_starts, self.response_starts.new_tensor([len(values)])])
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def count(self, flags: Tensor) -> Tensor:
        """flags [ΣR] bool → [B] int64: how many a row has that are set."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        row = torch.repeat_interleave(torch.arange(len(self)), self.response_lengths)
        return counts.index_add_(0, row, flags.to(torch.int64))


def _is_ragged(column: Any) -> bool:
    return isinstance(column, Tensor) and column.is_nested


def _extents(column: Any) -> tuple[Tensor, Tensor]:
    offsets = column.offsets().to(torch.int64)
    return offsets[:-1], offsets.diff()


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of one forward, and which of them share a row of its input: those of one tree."""

    rows: Tensor  # [b] which rows of `Rows`
    tree: Tensor  # [b] 0 … n − 1, ascending

    @staticmethod
    def apart(rows: Tensor) -> Cut:
        return Cut(rows, torch.arange(len(rows)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward. N is the number of response tokens that are scored, in row order."""

    input_ids: Tensor  # [n, T], or [1, Σ(S − 1)] when packed
    position_ids: Tensor | None  # packed: restarts at 0 for each row; trees: goes on from the prompt in each branch
    branch: Tensor | None  # [n, T] trees: 0 in the prompt, then 1, 2 …
    outputs: Tensor  # [N] positions in the flattened input that score the tokens
    targets: Tensor  # [N] the tokens
    places: Tensor  # [N] where these tokens are in response columns [ΣR]
    row: Tensor  # [N] row of each token, 0 … b − 1
    rows: Tensor  # [b] which rows of `Rows` these are

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in moved.items()}
        return MicroBatch(**moved)


def plan(widths: Sequence[int], budget: int, *, overhead: int = 256) -> list[list[int]]:
    """Cut rows into micro-batches of similar widths (positions of a row), each at most `budget` positions padded.

    Chooses the cuts of the sorted rows with the least padded positions plus `overhead` per
    micro-batch, the price of one more forward in positions. A row wider than the budget is alone.
    """
    if not len(widths):
        return []
    order = np.argsort(np.asarray(widths), kind="stable")
    distinct, counts = np.unique(np.asarray(widths), return_counts=True)
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    best = np.zeros(len(distinct) + 1)
    cut = np.zeros(len(distinct) + 1, dtype=np.int64)
    for end in range(1, len(distinct) + 1):
        width = distinct[end - 1]
        rows = cumulative[end] - cumulative[:end]
        forwards = np.ceil(rows / max(1, budget // width))
        cost = best[:end] + rows * width + forwards * overhead
        cut[end] = int(cost.argmin())
        best[end] = cost[cut[end]]
    return _chunks(order, distinct, cumulative, cut, budget)


def _chunks(
    order: np.ndarray, distinct: np.ndarray, cumulative: np.ndarray, cut: np.ndarray, budget: int
) -> list[list[int]]:
    """Walk the chosen cuts from the widest rows down, and split each segment evenly under the budget."""
    micro_batches: list[list[int]] = []
    end = len(distinct)
    while end > 0:
        segment = order[cumulative[cut[end]] : cumulative[end]]
        parts = -(-len(segment) // max(1, budget // int(distinct[end - 1])))
        micro_batches += [sorted(part.tolist()) for part in np.array_split(segment, parts)]
        end = int(cut[end])
    return micro_batches


def cuts(rows: Rows, chosen: Tensor, budget: int, *, dear: int, overhead: int) -> list[Cut]:
    """The chosen rows as forwards of at most `budget` positions, those with one prompt together where it pays."""
    prompts, branches = _positions(rows, chosen)
    tree = trees.grow(rows.tokens, rows.starts[chosen], prompts, branches, dear=dear)
    widths = torch.zeros(int(tree[-1]) + 1 if len(tree) else 0, dtype=torch.int64)
    widths.index_add_(0, tree, branches)
    widths[tree] += prompts
    order = torch.arange(len(chosen)).split(torch.bincount(tree).tolist())  # rows of each tree
    found = []
    for members in plan(widths.tolist(), budget, overhead=overhead):
        parts = [order[number] for number in members]
        number = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        found.append(Cut(chosen[torch.cat(parts)], number))
    return found


def _positions(rows: Rows, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions before a row's response, and those in it that go through the model: all but the last token's."""
    lengths = rows.response_lengths[chosen]
    return rows.lengths[chosen] - lengths, (lengths - 1).clamp(min=0)


def build(
    rows: Rows, cut: Cut, *, layout: str = "trimmed", keep: Tensor | None = None, width: int = 0
) -> MicroBatch:  # fmt: skip
    """The forward over these rows; `keep` [ΣR] leaves out response tokens that need no score.

    Right padding needs no attention mask: a causal model never looks at it. `width` pads further.
    """
    chosen, starts = cut.rows, rows.starts[cut.rows]
    row, within = spans(rows.response_lengths[chosen])
    places = rows.response_starts[chosen][row] + within
    if keep is not None:
        kept = keep[places].nonzero().squeeze(-1)
        row, within, places = row[kept], within[kept], places[kept]
    prompts, branches = _positions(rows, chosen)
    targets = rows.tokens[(starts + prompts)[row] + within]
    if layout == "packed":
        input_ids, position_ids, begin = _packed(rows.tokens, starts, prompts + branches)
        outputs = (begin + prompts)[row] + within - 1
        return MicroBatch(input_ids, position_ids, None, outputs, targets, places, row, chosen)
    grove = trees.plant(rows.tokens, starts, cut.tree, prompts, branches, width)
    # The first token of a response is scored by the last of its prompt, each later one by the one before it.
    before = torch.where(within == 0, prompts[row], grove.begin[row] + within) - 1
    outputs = cut.tree[row] * grove.tokens.shape[1] + before
    return MicroBatch(grove.tokens, grove.positions, grove.branch, outputs, targets, places, row, chosen)


def last_positions(rows: Rows, chosen: Tensor, *, layout: str = "trimmed") -> MicroBatch:
    """A forward over whole rows whose outputs are their last positions, for models that score a sequence."""
    starts, used = rows.starts[chosen], rows.lengths[chosen]
    number = torch.arange(len(chosen))
    if layout == "packed":
        input_ids, position_ids, begin = _packed(rows.tokens, starts, used)
    else:
        input_ids, position_ids = _trimmed(rows.tokens, starts, used), None
        begin = number * input_ids.shape[1]
    last = rows.tokens[starts + used - 1]
    last_places = rows.response_starts[chosen]
    return MicroBatch(input_ids, position_ids, None, begin + used - 1, last, last_places, number, chosen)


def _trimmed(tokens: Tensor, starts: Tensor, used: Tensor) -> Tensor:
    positions = torch.arange(int(used.max()))
    return tokens[starts[:, None] + torch.minimum(positions[None, :], (used - 1)[:, None])]  # padded with the last


def _packed(tokens: Tensor, starts: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    begin = used.cumsum(0) - used
    row = torch.repeat_interleave(torch.arange(len(used)), used)
    positions = torch.arange(len(row)) - begin[row]
    return tokens[starts[row] + positions][None], positions[None], begin
