"""Reads the files of a snapshot, and checks that they fit together before the queue uses them.

Checksums find damage. A snapshot from elsewhere can have right checksums and wrong contents, which would read memory of
other rows or fail in a later step, so that sizes, offsets and places are checked as well.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from tqppo.errors import CheckpointError, QueueError
from tqppo.queue.blocks.block import Block, Bytes, Field, Layout, parse
from tqppo.queue.blocks.encode import torch_dtype
from tqppo.queue.index.answers import TableDump
from tqppo.untrusted import parse_json, read_file, read_json

INDEX = "queue.json"
FORMAT = 2
MAX_INDEX_BYTES = 1 << 30
BLOCK_FILE = re.compile(r"block_\d+\.tqb")
BLOCK_NAME = re.compile(r"[0-9a-f]{32}")
KINDS = ("dense", "ragged", "json")
NUMBER = re.compile(r"[0-9]{1,18}")


class BlockFile(TypedDict):
    file: str
    bytes: int
    crc32: int


class SnapshotState(TypedDict):
    """What the JSON file holds, in addition to its checksum."""

    format: int
    tables: dict[str, TableDump]
    blocks: dict[str, BlockFile]


class _Wrong(ValueError):
    """What does not fit, in words."""


def checksum(state: SnapshotState) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def read_index(folder: Path) -> SnapshotState:
    """The JSON file of a snapshot. `CheckpointError` if it is missing, damaged, or of another format."""
    path = folder / INDEX
    try:
        state = read_json(path, MAX_INDEX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no snapshot of a queue: {INDEX} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it is not a table")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')!r:.40}; this version reads {FORMAT}")
    if state.pop("crc32", None) != checksum(cast(SnapshotState, state)):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
    try:
        _check_index(state)
    except _Wrong as wrong:
        raise CheckpointError(f"{path} is damaged: {wrong}") from None
    return cast(SnapshotState, state)


def read_block(folder: Path, entry: BlockFile) -> Block:
    """A block under a new name, because the queue may still hold it under its old one."""
    path = folder / entry["file"]
    try:
        content = read_file(path, entry["bytes"])
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing from the snapshot") from None
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error.strerror}") from None
    data: Bytes = np.frombuffer(content, np.uint8)
    if data.nbytes != entry["bytes"] or zlib.crc32(content) != entry["crc32"]:
        raise CheckpointError(f"{path} is damaged: its length or checksum differs from {INDEX}")
    try:
        _check_block(parse(data), data)
        return Block.of(data).renamed()
    except (QueueError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class Cut:
    """What the index may say of a block: its rows and columns."""

    num_rows: int
    columns: frozenset[str]


def check_places(tables: Mapping[str, TableDump], blocks: Mapping[int, Cut]) -> None:
    """`CheckpointError` if a row of the index lies in no block, or outside of it."""
    for name, table in tables.items():
        for column, (numbers, rows) in table["columns"].items():
            block_of, row_of = np.asarray(numbers, np.int64), np.asarray(rows, np.int64)
            for number in np.unique(block_of[block_of >= 0]).tolist():
                cut, last = blocks.get(number), row_of[block_of == number].max()
                if cut is None or column not in cut.columns or last >= cut.num_rows:
                    raise CheckpointError(
                        f"the snapshot's index is damaged: column {column!r:.60} of partition {name!r:.60} "
                        f"is not in block {number}"
                    )


# -- the index ---------------------------------------------------------------------------------------------------------


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise _Wrong(what)


def _check_index(state: Mapping[str, object]) -> None:
    tables, blocks = state.get("tables"), state.get("blocks")
    _require(isinstance(tables, dict) and isinstance(blocks, dict), "it has no tables or no blocks")
    for number, entry in cast("dict[str, object]", blocks).items():
        _require(NUMBER.fullmatch(number) is not None, f"{number!r:.40} is not the number of a block")
        _check_entry(entry)
    for name, table in cast("dict[str, object]", tables).items():
        _check_table(table, f"partition {name!r:.60}")


def _check_entry(entry: object) -> None:
    _require(isinstance(entry, dict), f"{entry!r:.40} does not describe a block")
    file = cast("dict[str, object]", entry).get("file")
    sizes = [cast("dict[str, object]", entry).get(name) for name in ("bytes", "crc32")]
    _require(isinstance(file, str) and BLOCK_FILE.fullmatch(file) is not None, f"{file!r:.60} is no file of a block")
    _require(all(_is_count(size) for size in sizes), f"the size or checksum of {file} is no number")


def _check_table(table: object, what: str) -> None:
    _require(isinstance(table, dict), f"{what} is not a table")
    keys, tags, columns = (cast("dict[str, object]", table).get(name) for name in ("keys", "tags", "columns"))
    _require(isinstance(keys, list) and all(isinstance(key, str) for key in keys), f"{what} has no list of keys")
    names = cast("list[str]", keys)
    _require(len(set(names)) == len(names), f"{what} has a key twice")
    is_tagged = isinstance(tags, list) and len(tags) == len(names) and all(isinstance(each, dict) for each in tags)
    _require(is_tagged, f"{what} does not have tags for each key")
    _require(isinstance(columns, dict), f"{what} has no columns")
    for column, cells in cast("dict[str, object]", columns).items():
        is_pair = isinstance(cells, list) and len(cells) == 2 and all(_is_cells(part, len(names)) for part in cells)
        _require(is_pair, f"{what}: column {column!r:.60} does not have a place for each key")


def _is_cells(part: object, length: int) -> bool:
    is_list = isinstance(part, list) and len(part) == length
    return is_list and all(each == -1 or _is_count(each, limit=2**31) for each in cast("list[object]", part))


def _is_count(value: object, *, limit: int = 2**62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


# -- blocks ------------------------------------------------------------------------------------------------------------


def _check_block(layout: Layout, data: Bytes) -> None:
    _require(isinstance(layout.block, str) and BLOCK_NAME.fullmatch(layout.block) is not None, "it has another name")
    for field in layout.fields.values():
        _check_types(field)
    _require(layout.num_bytes == data.nbytes, "its header describes another number of bytes")
    for field in layout.fields.values():
        _check_field(field, layout.num_rows, data)


def _check_types(field: Field) -> None:
    is_known = isinstance(field.name, str) and isinstance(field.dtype, str) and field.kind in KINDS
    sizes = (*field.shape, field.ragged_dim, field.num_bytes)
    _require(is_known and all(map(_is_count, sizes)), f"its header does not describe column {field.name!r:.60}")


def _check_field(field: Field, num_rows: int, data: Bytes) -> None:
    what = f"column {field.name!r:.60}"
    item = 1 if field.kind == "json" else torch_dtype(field.dtype).itemsize * math.prod(field.shape)
    _require(0 <= field.ragged_dim <= len(field.shape), f"{what} is ragged in a dimension that it does not have")
    if field.kind == "dense":
        _require(field.num_bytes == num_rows * item, f"{what} has another size than its shape says")
        return
    offsets = data[field.offsets : field.offsets + 8 * (num_rows + 1)].view(np.int64)
    is_rising = int(offsets[0]) == 0 and bool((np.diff(offsets) >= 0).all())
    _require(is_rising and int(offsets[-1]) * item == field.num_bytes, f"{what} has rows outside of its values")
    if field.kind == "json":
        _check_json(data[field.start : field.start + field.num_bytes].tobytes(), offsets.tolist(), what)


def _check_json(text: bytes, offsets: list[int], what: str) -> None:
    for begin, end in pairwise(offsets):
        try:
            parse_json(text[begin:end])
        except ValueError as error:
            raise _Wrong(f"{what} holds a value that is not JSON: {error}") from None
