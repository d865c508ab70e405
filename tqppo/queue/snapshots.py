"""The queue on disk: every block in its own format, and one JSON file with keys, tags and cells. No pickle.

The JSON file is written last, so a folder without it is not a snapshot. Storages know nothing of it: what one
saved, another restores.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tqppo.errors import CheckpointError, DataLost
from tqppo.protocols import Locator, Storage
from tqppo.queue.blocks.block import Block, BlockView
from tqppo.queue.link.calls import tidy

INDEX = "queue.json"
FORMAT = 2

Ask = Callable[..., Awaitable[Any]]


async def save(folder: Path, ask: Ask, storage: Storage) -> None:
    if (folder / INDEX).exists():
        raise CheckpointError(f"{folder} holds a snapshot of a queue already")
    folder.mkdir(parents=True, exist_ok=True)
    state = await ask("dump")
    try:
        files = await _save_blocks(folder, state["blocks"], storage)
    finally:
        await tidy(ask("unpin", state["pin"]))
    text = {"format": FORMAT, "tables": _plain(state["tables"]), "blocks": files}
    _write(folder / INDEX, [json.dumps({**text, "crc32": _checksum(text)}).encode()])


def _checksum(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


async def _save_blocks(folder: Path, blocks: Mapping[int, Locator], storage: Storage) -> dict[str, dict[str, Any]]:
    """One file per block, with its length and checksum. The index holds on to the blocks meanwhile."""
    files = {}
    for number, locator in blocks.items():
        (view,) = await storage.read([locator], None)
        if view is None:
            raise DataLost(f"a block of {locator.num_bytes:,} bytes is not on node {locator.node} any more")
        name = f"block_{number:06d}.tqb"
        pieces = _pieces(view)
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        _write(folder / name, pieces)
        files[str(number)] = {"file": name, "bytes": sum(len(p) for p in pieces), "crc32": checksum}
    return files


def _pieces(view: BlockView) -> list[memoryview]:
    """The block's bytes in order, padding included."""
    pieces, position = [memoryview(view.layout.header)], len(view.layout.header)
    for start, size in view.layout.pieces():
        pieces.append(memoryview(bytes(start - position)))
        pieces.append(np.ascontiguousarray(view.piece(start, size)).data)
        position = start + size
    pieces.append(memoryview(bytes(view.layout.num_bytes - position)))
    return pieces


def _write(path: Path, pieces: list[Any]) -> None:
    """To a temporary name, synced, then renamed: the file is whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _plain(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            **table,
            "columns": {column: [part.tolist() for part in cells] for column, cells in table["columns"].items()},
        }
        for name, table in tables.items()
    }


async def load(folder: Path, ask: Ask, storage: Storage, budget_bytes: int) -> None:
    state = _read_index(folder)
    total = sum(entry["bytes"] for entry in state["blocks"].values())
    if total > budget_bytes:
        raise CheckpointError(
            f"{folder} holds {total:,} bytes, more than the queue's budget of {budget_bytes:,} bytes per node; "
            "raise storage.budget_gb"
        )
    written: dict[int, Locator] = {}
    is_sent = False
    try:
        for number, entry in state["blocks"].items():
            locator = written[int(number)] = await storage.write(_read_block(folder / entry["file"], entry))
            await ask("expect", locator)
        is_sent = True
        await ask("load", state["tables"], written)
    except BaseException as error:
        if not is_sent or isinstance(error, CheckpointError):  # else the index may have taken the blocks
            storage.free(list(written.values()))
            await tidy(ask("forget", [locator.block for locator in written.values()]))
        raise


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no snapshot of a queue: {INDEX} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder / INDEX} has format {state.get('format')!r}; this version reads {FORMAT}")
    if state.pop("crc32", None) != _checksum(state):
        raise CheckpointError(f"{folder / INDEX} is damaged: its checksum is not what it says")
    return state


def _read_block(path: Path, entry: Mapping[str, Any]) -> Block:
    try:
        data = np.fromfile(path, np.uint8)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing from the snapshot") from None
    if data.nbytes != entry["bytes"] or zlib.crc32(data.data) != entry["crc32"]:
        raise CheckpointError(f"{path} is damaged: its length or checksum is not what {INDEX} says")
    return Block.of(data).renamed()  # it may be restored twice, or beside the rows that were saved
