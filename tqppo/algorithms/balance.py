"""Who computes what: rows over ranks by workload, rows into micro-batches by tokens. Plain numbers, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from tqppo.errors import DataError

_MAX_SWAPS = 64
_QUICK = 50_000  # rows × parts that differencing handles in some 20 ms
_GOOD_ENOUGH = 1.001  # dearest part over the mean
_LINEAR = 24_576  # a dense 7B's work per token, next to 1 per pair of tokens in attention


def workload(num_tokens: int) -> int:
    """What a row costs, up to a constant: linear layers and attention."""
    return _LINEAR * num_tokens + num_tokens * num_tokens


def partition(
    costs: Sequence[float], parts: int, *, equal_count: bool = True, is_padding: Sequence[bool] = ()
) -> list[list[int]]:
    """Indices split into `parts` of about equal cost (and, with `equal_count`, equal size), sorted inside each.

    Karmarkar–Karp's largest differencing, then swaps between the dearest and the other parts while they help.
    Padding is cheapest, so differencing spreads it evenly over the parts, and it is not swapped.
    """
    if equal_count and len(costs) % parts:
        raise DataError(f"{len(costs)} rows do not divide over {parts} ranks; pad them first")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    step = parts if equal_count else 1
    heap = [_tuple(costs, order[i : i + step], parts, i) for i in range(0, len(order), step)]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, _merge(heapq.heappop(heap), heapq.heappop(heap)))
    groups = [list(members) for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]
    _swap_while_better(costs, groups, is_padding)
    return [sorted(group) for group in groups]


_Parts = list[tuple[float, list[int]]]  # cost and members, dearest first
_State = tuple[float, int, _Parts]  # minus the spread, a tie-breaker, the parts


def _tuple(costs: Sequence[float], members: Sequence[int], parts: int, number: int) -> _State:
    state: _Parts = [(costs[i], [i]) for i in members]
    state += [(0.0, []) for _ in range(parts - len(members))]
    return -(state[0][0] - state[-1][0]), number, state


def _merge(first: _State, second: _State) -> _State:
    """Dearest of the one with cheapest of the other."""
    pairs = zip(first[2], reversed(second[2]), strict=True)
    merged = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
    merged.sort(key=lambda part: -part[0])
    return -(merged[0][0] - merged[-1][0]), min(first[1], second[1]), merged


def _swap_while_better(costs: Sequence[float], groups: list[list[int]], pinned: Sequence[bool]) -> None:
    """Swap one item of the dearest group for a cheaper one of another, as long as that lowers the maximum."""
    cost = np.asarray(costs, dtype=np.float64)
    home = np.empty(len(cost), dtype=np.int64)
    for number, group in enumerate(groups):
        home[group] = number
    sums = np.bincount(home, weights=cost, minlength=len(groups))
    free = ~np.asarray(pinned, dtype=bool) if pinned else np.ones(len(cost), dtype=bool)
    for _ in range(_MAX_SWAPS):
        top = int(sums.argmax())
        if sums[top] <= sums.mean() * _GOOD_ENOUGH:
            break
        mine, others = np.flatnonzero(free & (home == top)), np.flatnonzero(free & (home != top))
        gain = cost[mine][:, None] - cost[others]  # what the dearest group loses
        height = np.maximum(sums[top] - gain, sums[home[others]] + gain)
        if height.size == 0 or height.min() >= sums[top]:
            break
        a, b = np.unravel_index(height.argmin(), height.shape)
        sums[top], sums[home[others[b]]] = sums[top] - gain[a, b], sums[home[others[b]]] + gain[a, b]
        home[mine[a]], home[others[b]] = home[others[b]], top
    groups[:] = [np.flatnonzero(home == number).tolist() for number in range(len(groups))]


def num_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches of at most `max_tokens` a rank needs; every rank then makes as many as the neediest."""
    return len(_first_fit(lengths, max_tokens))


def micro_batches(lengths: Sequence[int], max_tokens: int, count: int | None = None) -> list[list[int]]:
    """Rows in `count` micro-batches (default: as few as fit), none empty, none over `max_tokens`, about equal work."""
    bins = _first_fit(lengths, max_tokens)
    count = len(bins) if count is None else count
    if not len(bins) <= count <= len(lengths):
        raise DataError(
            f"{len(lengths)} rows with {sum(lengths)} tokens cannot make {count} micro-batches of at most {max_tokens} "
            f"tokens; between {len(bins)} and {len(lengths)} would do"
        )
    even = _evenly(lengths, max_tokens, count)
    while even is None and len(bins) < count:
        bins.sort(key=len)
        rows = bins.pop()
        bins += [rows[0::2], rows[1::2]]
    return sorted(sorted(rows) for rows in even or bins)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _evenly(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]] | None:
    """`partition` by work if its parts fit the budget (and it is quick), otherwise greedily; None if neither fits.

    Greedily: rows from long to short, each to the bin with the least work so far that has room.
    """
    if len(lengths) * count <= _QUICK:
        parts = partition([workload(n) for n in lengths], count, equal_count=False)
        if all(part and sum(lengths[i] for i in part) <= max_tokens for part in parts):
            return parts
    bins: list[list[int]] = [[] for _ in range(count)]
    room = np.full(count, max_tokens, dtype=np.int64)
    work = np.zeros(count)
    for i in _longest_first(lengths):
        target = int(np.where(room >= lengths[i], work, np.inf).argmin())
        if room[target] < lengths[i]:
            return None
        bins[target].append(i)
        room[target] -= lengths[i]
        work[target] += workload(lengths[i])
    return bins


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows from long to short, each to the first bin that has room: few bins, unevenly filled."""
    too_long = [n for n in lengths if n > max_tokens]
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} rows are longer than micro_batch_tokens = {max_tokens}; "
            f"the longest has {max(too_long)} tokens: set micro_batch_tokens to at least that"
        )
    bins: list[list[int]] = [[] for _ in lengths]
    room = np.full(len(lengths), max_tokens, dtype=np.int64)
    for i in _longest_first(lengths):
        target = int((room >= lengths[i]).argmax())
        bins[target].append(i)
        room[target] -= lengths[i]
    return [rows for rows in bins if rows]
