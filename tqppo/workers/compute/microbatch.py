"""Micro-batches from rows: flat columns, cuts by token budget, and tensors for a forward with little padding.

The last token of a row needs no forward: the output at position t scores token t + 1, so a row of S tokens takes S − 1
positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from tqppo import columns
from tqppo.algorithms.layout import response_positions, to_nested
from tqppo.workers.compute import shared_prompts
from tqppo.workers.compute.shared_prompts import spans


@dataclass(frozen=True, slots=True)
class FlatRows:
    """B rows laid end to end. Response columns share one layout: [ΣR], row i at `response_starts[i]`."""

    tokens: Tensor  # [ΣS]
    starts: Tensor  # [B] int64, index of a row's first token
    lengths: Tensor  # [B] int64, S
    response_starts: Tensor  # [B]
    response_lengths: Tensor  # [B], R
    response: Mapping[str, Tensor]  # name → [ΣR, …]
    sequence: Mapping[str, Tensor]  # name → [ΣS, …] laid out as `tokens`; the entry of a token is about the next one
    row: Mapping[str, Tensor]  # name → [B, …]

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(given: Mapping[str, Tensor]) -> FlatRows:
        """Flatten columns as the queue returns them: jagged nested tensors, and dense ones for values per row."""
        tokens = given["tokens"]
        starts, lengths = _extents(tokens)
        response_starts, response_lengths = _extents(given["response_mask"])
        assert bool((lengths > response_lengths).all()), "a row needs at least one prompt token"
        nested = {name: c.values() for name, c in given.items() if c.is_nested and name != "tokens"}
        sequence = {name: values for name, values in nested.items() if _is_per_position(name)}
        response = {name: values for name, values in nested.items() if name not in sequence}
        for layout, total in ((sequence, int(lengths.sum())), (response, int(response_lengths.sum()))):
            wrong = {name: len(values) for name, values in layout.items() if len(values) != total}
            assert not wrong, f"columns of other lengths than the rows' total of {total}: {wrong}"
        row = {name: c for name, c in given.items() if not c.is_nested}
        return FlatRows(tokens.values(), starts, lengths, response_starts, response_lengths, response, sequence, row)

    def jagged(self, values: Tensor) -> Tensor:
        """A response column [ΣR] as a jagged nested tensor."""
        return to_nested(values, self.response_lengths)

    def response_tokens(self) -> Tensor:
        """The tokens of the responses: [ΣR]."""
        return self.tokens[response_positions(self.lengths, self.response_lengths) + 1]

    def positions(self, row: Tensor, places: Tensor) -> Tensor:
        """Positions in sequence columns [ΣS] that are about these response tokens, given by row and place: [N] each."""
        before = self.starts[row] + self.lengths[row] - self.response_lengths[row] - 1
        return before + places - self.response_starts[row]

    def count(self, flags: Tensor) -> Tensor:
        """Number of set flags of each row: [ΣR] bool → [B] int64."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        row = torch.repeat_interleave(torch.arange(len(self)), self.response_lengths)
        return counts.index_add_(0, row, flags.to(torch.int64))


def _is_per_position(name: str) -> bool:
    declared = columns.declared().get(name)
    return declared is not None and declared.kind is columns.Kind.SEQUENCE


def _extents(column: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and lengths of a jagged tensor's rows: [B] int64 each."""
    offsets: Tensor = column.offsets().to(torch.int64)  # type: ignore[attr-defined]
    return offsets[:-1], offsets.diff()


@dataclass(frozen=True, slots=True)
class MicroBatchCut:
    """The rows of one forward, and the bundle of each: rows of one bundle share their prompt."""

    rows: Tensor  # [b] indices into `FlatRows`
    bundle: Tensor  # [b] 0 … n − 1, ascending

    @staticmethod
    def apart(rows: Tensor) -> MicroBatchCut:
        """Each row in a bundle of its own."""
        return MicroBatchCut(rows, torch.arange(len(rows)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward, which scores N response tokens in row order."""

    input_ids: Tensor  # [n, T], or [1, Σ(S − 1)] when packed
    position_ids: Tensor | None  # packed: restart at 0 for each row; bundles: each response continues from the prompt
    response: Tensor | None  # [n, T], bundles: 0 in the prompt, then the number of the response
    outputs: Tensor  # [N] positions in the flattened input that score the tokens
    targets: Tensor  # [N] the tokens
    places: Tensor  # [N] indices of these tokens in response columns [ΣR]
    row: Tensor  # [N] row of each token, 0 … b − 1
    rows: Tensor  # [b] indices of the rows in `FlatRows`

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return replace(self, **{name: each.to(device) for name, each in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def plan(widths: Sequence[int], budget: int, *, overhead: int = 256) -> list[list[int]]:
    """Cut rows into micro-batches of similar widths (positions of a row), each at most `budget` positions with padding.

    Chooses the cuts of the sorted rows with the fewest padded positions plus `overhead` per micro-batch, the cost of
    one more forward in positions. A row wider than the budget gets a micro-batch of its own.
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


def cuts(
    rows: FlatRows, chosen: Tensor, budget: int, *, attention_pairs_per_token: int, overhead: int
) -> list[MicroBatchCut]:
    """Cut the chosen rows into forwards of at most `budget` positions; rows with one prompt share it where it pays."""
    prompts, responses = _positions(rows, chosen)
    bundle = shared_prompts.assign_bundles(
        rows.tokens, rows.starts[chosen], prompts, responses, attention_pairs_per_token=attention_pairs_per_token
    )
    widths = torch.zeros(int(bundle[-1]) + 1 if len(bundle) else 0, dtype=torch.int64)
    widths.index_add_(0, bundle, responses)
    widths[bundle] += prompts
    order = torch.split(torch.arange(len(chosen)), torch.bincount(bundle).tolist())  # rows of each bundle
    found = []
    for members in plan(widths.tolist(), budget, overhead=overhead):
        parts = [order[number] for number in members]
        number = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        found.append(MicroBatchCut(chosen[torch.cat(parts)], number))
    return found


def _positions(rows: FlatRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of positions before each row's response, and of those in it that need a forward: all but the last."""
    lengths = rows.response_lengths[chosen]
    return rows.lengths[chosen] - lengths, (lengths - 1).clamp(min=0)


def build(
    rows: FlatRows, cut: MicroBatchCut, *, layout: str = "trimmed", keep: Tensor | None = None, width: int = 0
) -> MicroBatch:  # fmt: skip
    """The forward over these rows. `keep` [ΣR] is false for response tokens that need no score.

    Right padding needs no attention mask, because a causal model never attends to it. `width` pads further.
    """
    chosen, starts = cut.rows, rows.starts[cut.rows]
    row, within = spans(rows.response_lengths[chosen])
    places = rows.response_starts[chosen][row] + within
    if keep is not None:
        kept = keep[places].nonzero().squeeze(-1)
        row, within, places = row[kept], within[kept], places[kept]
    prompts, responses = _positions(rows, chosen)
    targets = rows.tokens[(starts + prompts)[row] + within]
    if layout == "packed":
        input_ids, position_ids, begin = _packed(rows.tokens, starts, prompts + responses)
        outputs = (begin + prompts)[row] + within - 1
        return MicroBatch(input_ids, position_ids, None, outputs, targets, places, row, chosen)
    bundled = shared_prompts.lay_out(rows.tokens, starts, cut.bundle, prompts, responses, width)
    # The first token of a response is scored by the last of its prompt, each later one by the one before it.
    before = torch.where(within == 0, prompts[row], bundled.begin[row] + within) - 1
    outputs = cut.bundle[row] * bundled.tokens.shape[1] + before
    return MicroBatch(bundled.tokens, bundled.positions, bundled.response, outputs, targets, places, row, chosen)


def last_positions(rows: FlatRows, chosen: Tensor, *, layout: str = "trimmed") -> MicroBatch:
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
    return tokens[
        starts[:, None] + torch.minimum(positions[None, :], (used - 1)[:, None])
    ]  # padded with the last token


def _packed(tokens: Tensor, starts: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    begin = used.cumsum(0) - used
    row = torch.repeat_interleave(torch.arange(len(used)), used)
    positions = torch.arange(len(row)) - begin[row]
    return tokens[starts[row] + positions][None], positions[None], begin
