"""Rows over ranks by workload, and rows into micro-batches by tokens. Plain numbers, no tensors.

Both are greedy. Finer searches (largest differencing, swaps between ranks) gain less than 2 % of a step at 2 to 8
ranks: `make bench-update` prints how far the greedy split is from an even one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tqppo.errors import DataError

_LINEAR = 24_576  # a dense 7B model's work per token, where one pair of tokens in attention is 1


def workload(num_tokens: int) -> int:
    """Cost of a row, up to a constant: linear layers and attention."""
    return _LINEAR * num_tokens + num_tokens * num_tokens


def partition(costs: Sequence[float], parts: int, *, equal_count: bool = True) -> list[list[int]]:
    """Split indices into `parts` of about equal cost (and, with `equal_count`, equal size), sorted inside each.

    Takes the items from the most to the least expensive and gives each to the part with the lowest cost so far that
    has room.
    """
    if equal_count and len(costs) % parts:
        raise DataError(f"{len(costs)} rows do not divide over {parts} ranks; pad them first")
    most = len(costs) // parts if equal_count else len(costs)
    groups: list[list[int]] = [[] for _ in range(parts)]
    cheapest = [(0.0, part) for part in range(parts)]  # a heap of the parts that have room
    for i in _largest_first(costs):
        cost, target = heapq.heappop(cheapest)
        groups[target].append(i)
        if len(groups[target]) < most:
            heapq.heappush(cheapest, (cost + costs[i], target))
    return [sorted(group) for group in groups]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in few micro-batches of at most `max_tokens`: from long to short, each to the first that has room."""
    too_long = [n for n in lengths if n > max_tokens]
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} rows are longer than micro_batch_tokens = {max_tokens}; "
            f"the longest has {max(too_long)} tokens: set micro_batch_tokens to at least that"
        )
    batches: list[list[int]] = []
    room: list[int] = []
    for i in _largest_first(lengths):
        target = next((number for number, free in enumerate(room) if free >= lengths[i]), len(batches))
        if target == len(batches):
            batches.append([])
            room.append(max_tokens)
        batches[target].append(i)
        room[target] -= lengths[i]
    return sorted(sorted(rows) for rows in batches)


def _largest_first(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
