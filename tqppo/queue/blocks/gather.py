"""Reads rows out of blocks: as a view where they are adjacent, otherwise by one gather into reused memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor

from tqppo.columns import Kind, column
from tqppo.errors import QueueError
from tqppo.queue.blocks.arena import Arena
from tqppo.queue.blocks.block import Block, BlockView, Bytes, Encoded, Field, build
from tqppo.queue.blocks.encode import torch_dtype
from tqppo.queue.meta import Json

Views = Sequence[BlockView] | Mapping[int, BlockView]  # by the number that runs call them
SHORT_RUN = 192  # bytes; the cost of copying a run equals that of picking this many bytes element by element


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a ragged column: where its rows begin, in tokens, and torch's cache of the extreme lengths."""

    offsets: Tensor  # [B + 1]
    bounds: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive rows: run i is rows `first[i]` to `last[i]`, exclusive, of block `block[i]`."""

    block: np.ndarray
    first: np.ndarray
    last: np.ndarray
    blocks: tuple[int, ...]  # distinct

    @staticmethod
    def of(block: np.ndarray, row: np.ndarray) -> Runs:
        """The runs of a column's cells (block, row), in the order of the request."""
        breaks = np.flatnonzero((np.diff(block) != 0) | (np.diff(row) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        ends = np.concatenate((breaks, [len(row)]))
        return Runs(block[starts], row[starts], row[ends - 1] + 1, tuple(dict.fromkeys(block[starts].tolist())))


def gather(
    views: Views, runs: Runs, name: str, arena: Arena, shapes: dict[bytes, Shape] | None = None
) -> Tensor | list[Json]:
    """One column of the rows of `runs`: a dense tensor [B, *trailing], a jagged nested tensor, or a list.

    Columns whose rows have equal lengths share offsets by way of `shapes`. Torch then treats them as tensors of one
    shape, so that they can be added and multiplied.
    """
    fields = [views[i].layout.fields[name] for i in runs.blocks]
    _check_alike(name, fields)
    like = fields[0]
    if like.kind == "dense":
        return tensor_over(*_dense(views, runs, like, arena))
    values, lengths = _ragged(views, runs, like, arena)
    if like.kind == "json":
        return _decoded(values, lengths)
    shape = _shape(lengths, {} if shapes is None else shapes)
    return _nested(_restore_ragged_dim(tensor_over(values, like, int(shape.offsets[-1])), like, arena), shape, like)


def _check_alike(name: str, fields: Sequence[Field]) -> None:
    kinds = {(field.kind, field.dtype, field.shape, field.ragged_dim) for field in fields}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} {shape}" for _, dtype, shape, _ in kinds))
        raise QueueError(f"column {name!r}: rows of one batch were put with different shapes: {found}")


def _dense(views: Views, runs: Runs, like: Field, arena: Arena) -> tuple[Bytes, Field, int]:
    size, num_rows = _item_bytes(like), int((runs.last - runs.first).sum())
    if len(runs.block) > 1 and len(runs.blocks) == 1 and size:
        values = arena.lend(num_rows * size)
        source = views[runs.block[0]].values(like.name).reshape(-1, size)
        np.take(source, _rows(runs), axis=0, out=values.reshape(-1, size), mode="clip")  # "raise" would buffer
    else:
        sources = _cuts(views, runs, like.name, runs.first.astype(np.int64) * size, runs.last.astype(np.int64) * size)
        values = _joined(views, runs, sources, num_rows * size, arena)
    return values, like, num_rows


def _ragged(views: Views, runs: Runs, like: Field, arena: Arena) -> tuple[Bytes, np.ndarray]:
    """The values of the rows one after the other, and their lengths in tokens."""
    size = _item_bytes(like)
    if len(runs.block) == 1:
        return _one_run(views[runs.block[0]], int(runs.first[0]), int(runs.last[0]), like, arena)
    offsets = {i: views[i].offsets(like.name) for i in runs.blocks}
    if len(offsets) == 1:
        of = next(iter(offsets.values()))
        starts, stops = of[runs.first] * size, of[runs.last] * size
        lengths = np.diff(of)[_rows(runs)]
    else:
        cuts = [offsets[b][f : e + 1] for b, f, e in _each(runs)]
        starts = np.array([cut[0] for cut in cuts]) * size
        stops = np.array([cut[-1] for cut in cuts]) * size
        lengths = np.concatenate([np.diff(cut) for cut in cuts])
    total = int((stops - starts).sum())
    if len(offsets) == 1 < len(starts) and total < SHORT_RUN * len(starts) and size in (1, 2, 4, 8):
        values = views[runs.block[0]].values(like.name)
        return _gather_elements(values.view(f"u{size}"), starts // size, stops // size, arena), lengths
    return _joined(views, runs, _cuts(views, runs, like.name, starts, stops), total, arena), lengths


def _one_run(view: BlockView, first: int, last: int, like: Field, arena: Arena) -> tuple[Bytes, np.ndarray]:
    """The rows of a single run, which is the usual case, at a fraction of the general cost."""
    size, offsets = _item_bytes(like), view.offsets(like.name)[first : last + 1]
    values = view.values(like.name)[int(offsets[0]) * size : int(offsets[-1]) * size]
    if not view.writable:
        out = arena.lend(values.nbytes)
        out[:] = values
        values = out
    return values, offsets[1:] - offsets[:-1]


def _rows(runs: Runs) -> np.ndarray:
    counts = runs.last - runs.first
    return np.repeat(runs.last - counts.cumsum(), counts) + np.arange(counts.sum())


def _gather_elements(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, arena: Arena) -> Bytes:
    """Gather very short runs element by element, in one vectorised pass instead of a copy per run."""
    counts = stops - starts
    index = np.repeat(stops - counts.cumsum(), counts) + np.arange(counts.sum())
    out = arena.lend(len(index) * values.itemsize)
    np.take(values, index, out=out.view(values.dtype), mode="clip")
    return out


def _each(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.block.tolist(), runs.first.tolist(), runs.last.tolist(), strict=True))


def _cuts(views: Views, runs: Runs, name: str, starts: np.ndarray, stops: np.ndarray) -> list[Bytes]:
    """The bytes of every run, at the cost of one slice each, because there may be thousands."""
    values = {i: views[i].values(name) for i in runs.blocks}
    edges = zip(runs.block.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [values[block][start:stop] for block, start, stop in edges]


def _joined(views: Views, runs: Runs, sources: list[Bytes], num_bytes: int, arena: Arena) -> Bytes:
    if len(sources) == 1 and views[runs.block[0]].writable:
        return sources[0]
    out = arena.lend(num_bytes)
    np.concatenate(sources, out=out)
    return out


def _item_bytes(like: Field) -> int:
    if like.kind == "json":
        return 1
    return torch_dtype(like.dtype).itemsize * math.prod(like.shape)


def tensor_over(values: Bytes, like: Field, count: int) -> Tensor:
    """A tensor [count, *shape] over the bytes, which it keeps alive."""
    if values.nbytes == 0:
        return torch.empty((count, *like.shape), dtype=torch_dtype(like.dtype))
    return torch.frombuffer(values, dtype=torch_dtype(like.dtype)).view(count, *like.shape)


def _restore_ragged_dim(values: Tensor, like: Field, arena: Arena) -> Tensor:
    """Move tokens from the first dimension back to the column's ragged dimension."""
    if not like.ragged_dim:
        return values
    turned = values.movedim(0, like.ragged_dim)
    if turned.numel() == 0:
        return turned.contiguous()
    memory = torch.frombuffer(arena.lend(values.nbytes), dtype=values.dtype)
    return memory.view(turned.shape).copy_(turned)


def _shape(lengths: np.ndarray, known: dict[bytes, Shape]) -> Shape:
    found = known.get(lengths.tobytes())
    if found is None:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        shortest, longest = int(lengths.min()) if len(lengths) else 0, int(lengths.max(initial=0))
        bounds = {"min_seqlen": _store_val_in_tensor(shortest), "max_seqlen": _store_val_in_tensor(longest)}
        found = known[lengths.tobytes()] = Shape(torch.from_numpy(offsets), bounds)
    return found


def _nested(values: Tensor, shape: Shape, like: Field) -> Tensor:
    """What `torch.nested.nested_tensor_from_jagged` makes, four times faster because it makes no view first."""
    bounds = dict(shape.bounds)
    return NestedTensor(values, shape.offsets, _ragged_idx=like.ragged_dim + 1, _metadata_cache=bounds)


def _decoded(values: Bytes, lengths: np.ndarray) -> list[Json]:
    text, ends = values.tobytes(), np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]] if ends else []
    return [json.loads(text[a:b]) for a, b in zip(starts, ends, strict=True)]


def nothing(name: str) -> Tensor | list[Json]:
    """A declared column without rows."""
    declared = column(name)
    if declared.kind is Kind.JSON:
        return []
    dtype = torch.float32 if declared.dtype == "any" else torch_dtype(declared.dtype)
    shape = tuple(size or 0 for size in declared.trailing)
    if declared.kind is Kind.ROW:
        return torch.empty((0, *shape), dtype=dtype)
    like = Field(name, "ragged", declared.dtype, shape or ((0,) if declared.ragged_dim else ()), declared.ragged_dim, 0)
    values = torch.empty((0, *like.shape), dtype=dtype).movedim(0, like.ragged_dim)
    return _nested(values, _shape(np.zeros(0, np.int64), {}), like)


def excerpt(view: BlockView, columns: Sequence[str], rows: np.ndarray) -> Block:
    """A new block with some rows and columns of another."""
    runs, arena = Runs.of(np.zeros(len(rows), np.int64), rows.astype(np.int64)), Arena()
    encoded = []
    for like in (view.layout.fields[name] for name in columns):
        offsets = None
        if like.kind == "dense":
            values = _dense([view], runs, like, arena)[0]
        else:
            values, lengths = _ragged([view], runs, like, arena)
            offsets = np.concatenate(([0], np.cumsum(lengths)))
        encoded.append(Encoded(like.name, like.kind, like.dtype, like.shape, like.ragged_dim, values, offsets))
    return build(encoded, len(rows))
