"""Rows that only fill up a batch: how many, what they hold, and where they go. The trainer and worker groups call it.

A padding row is made from the columns' declarations, never from a real row: one prompt token, one response token that
does not count, neutral values everywhere. Its tag `is_padding` keeps it out of every statistic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tqppo.columns import Column, Kind, column
from tqppo.errors import DataError

PROMPT_LENGTH = 1
RESPONSE_LENGTH = 1
_LENGTHS = {Kind.SEQUENCE: PROMPT_LENGTH + RESPONSE_LENGTH, Kind.RESPONSE: RESPONSE_LENGTH, Kind.RAGGED: 0}


def required_multiple(ranks: int, mini_batch_rows: Iterable[int] = ()) -> int:
    """What the number of rows must be a multiple of: the ranks, and each role's mini-batch (0: the whole batch)."""
    return math.lcm(ranks, *(rows for rows in mini_batch_rows if rows > 0))


def num_padding(num_rows: int, multiple: int) -> int:
    """How many rows are missing to the next multiple; no rows at all is an error, never a batch of padding."""
    if num_rows == 0:
        raise DataError("no trajectories: every session of the step failed or was filtered out, nothing to train on")
    return -num_rows % multiple


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """Ready for one put."""

    keys: list[str]
    tags: list[dict[str, Any]]
    columns: dict[str, Tensor | list[Any]]


def padding_rows(count: int, trailing: Mapping[str, tuple[int, ...]], *, step: int = 0) -> PaddingRows:
    """`count` padding rows with the columns named in `trailing`, which gives each one's sizes beyond the ragged one.

    A declared size must agree; where the declaration says None the size comes from `trailing`. Columns whose neutral
    value is None are left out.
    """
    columns: dict[str, Tensor | list[Any]] = {}
    for name, sizes in trailing.items():
        declared = column(name)
        if declared.neutral is not None:
            columns[name] = _neutral(declared, tuple(sizes), count)
    uid = f"pad{step}"
    lengths = {
        "prompt_len": PROMPT_LENGTH,
        "response_len": RESPONSE_LENGTH,
        "seq_len": PROMPT_LENGTH + RESPONSE_LENGTH,
    }
    tags = [{"uid": uid, "session": i, "trajectory": 0, "is_padding": True, **lengths} for i in range(count)]
    return PaddingRows([f"{uid}_{i}_0" for i in range(count)], tags, columns)


def _neutral(declared: Column, sizes: tuple[int, ...], count: int) -> Tensor | list[Any]:
    neutral = declared.neutral
    assert neutral is not None
    if declared.kind is Kind.JSON:
        return [neutral] * count
    fits = len(sizes) == len(declared.trailing) and all(
        known is None or known == size for known, size in zip(declared.trailing, sizes, strict=True)
    )
    if not fits:
        raise DataError(f"column {declared.name!r} is declared with sizes {declared.trailing}, found {sizes}")
    dtype = getattr(torch, declared.dtype)
    if declared.kind is Kind.ROW:
        return torch.full((count, *sizes), neutral, dtype=dtype)
    length, ragged = _LENGTHS[declared.kind], declared.ragged_dim
    values = torch.full((*sizes[:ragged], count * length, *sizes[ragged:]), neutral, dtype=dtype)
    offsets = torch.arange(count + 1) * length
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged + 1)


def mini_batches(is_padding: Tensor, count: int) -> list[Tensor]:
    """Row numbers of each of `count` mini-batches, all of one size: real rows in their order, then padding.

    Each gets ⌊real/count⌋ or ⌈real/count⌉ real rows, whatever the padding, so that the cut does not depend on ranks.
    """
    total = is_padding.numel()
    assert total % count == 0, f"{total} rows do not divide into {count} mini-batches; pad them first"
    real, padding = (~is_padding).nonzero().flatten(), is_padding.nonzero().flatten()
    reals = real.tensor_split(count)
    missing = [total // count - part.numel() for part in reals]
    return [torch.cat(pair) for pair in zip(reals, padding.split(missing), strict=True)]
