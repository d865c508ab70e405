"""Padding rows, which fill up a batch: how many are needed, what they contain, and which mini-batch they go to.

A padding row is made from the columns' declarations, never from a real row: one prompt token, one response token that
does not count, neutral values everywhere. Its tag `is_padding` keeps it out of every statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tqppo.columns import Column, Kind, RowTags, column, rows_of_padding
from tqppo.errors import DataError

PROMPT_LENGTH = 1
RESPONSE_LENGTH = 1
_LENGTHS = {Kind.SEQUENCE: PROMPT_LENGTH + RESPONSE_LENGTH, Kind.RESPONSE: RESPONSE_LENGTH, Kind.RAGGED: 0}


def num_padding(num_rows: int, multiple: int) -> int:
    """Number of rows missing to the next multiple. An empty batch is an error, never filled with padding."""
    if num_rows == 0:
        raise DataError("no trajectories: every session of the step failed or was filtered out, nothing to train on")
    return rows_of_padding(num_rows, multiple)


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """Keys, tags and columns of some padding rows, for one put to the queue."""

    keys: list[str]
    tags: list[RowTags]
    columns: dict[str, Tensor | list[object]]


def padding_rows(
    count: int,
    trailing: Mapping[str, tuple[int, ...]],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    step: int = 0,
) -> PaddingRows:
    """`count` padding rows with the columns of `trailing`, which holds each one's sizes besides the ragged one.

    The sizes must match the declared ones, where those are not None. Columns whose neutral value is None are left out.
    `dtypes` has the dtype of columns that are declared with any.
    """
    columns: dict[str, Tensor | list[object]] = {}
    for name, sizes in trailing.items():
        declared = column(name)
        if declared.neutral is not None:
            columns[name] = _neutral(declared, tuple(sizes), count, (dtypes or {}).get(name))
    uid = f"pad{step}"
    tags = [_tags(uid, session) for session in range(count)]
    return PaddingRows([f"{uid}_{i}_0" for i in range(count)], tags, columns)


def _tags(uid: str, session: int) -> RowTags:
    return RowTags(
        uid=uid,
        session=session,
        trajectory=0,
        prompt_len=PROMPT_LENGTH,
        response_len=RESPONSE_LENGTH,
        seq_len=PROMPT_LENGTH + RESPONSE_LENGTH,
        is_padding=True,
    )


def _neutral(
    declared: Column, sizes: tuple[int, ...], count: int, dtype: torch.dtype | None = None
) -> Tensor | list[object]:
    neutral = declared.neutral
    assert neutral is not None
    if declared.kind is Kind.JSON:
        return [neutral] * count
    fits = len(sizes) == len(declared.trailing) and all(
        known is None or known == size for known, size in zip(declared.trailing, sizes, strict=True)
    )
    if not fits:
        raise DataError(f"column {declared.name!r} is declared with sizes {declared.trailing}, found {sizes}")
    dtype = dtype or getattr(torch, declared.dtype)
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
    return [torch.cat(pair) for pair in zip(reals, torch.split(padding, missing), strict=True)]
