"""The queue on disk: a file per block, and one JSON file with keys, tags and cells. No pickle.

The JSON file is written last, so a folder without it is not a snapshot. The format does not depend on the storage:
a snapshot of one storage can be restored into another.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tqppo import space
from tqppo.errors import CheckpointError, DataLost
from tqppo.queue.blocks.block import BlockView
from tqppo.queue.connection import Connection
from tqppo.queue.index.answers import TableDump
from tqppo.queue.index.snapshots import Snapshots
from tqppo.queue.link.calls import clean_up
from tqppo.queue.saved import (
    FORMAT,
    INDEX,
    BlockFile,
    Cut,
    SnapshotState,
    check_places,
    checksum,
    read_block,
    read_index,
)
from tqppo.queue.storage import Locator, Storage


async def save(folder: Path, connection: Connection) -> None:
    """Write a snapshot of the queue as it is when the call begins, even if rows come and go while it is written."""
    if (folder / INDEX).exists():
        raise CheckpointError(f"{folder} already holds a snapshot of a queue")
    folder.mkdir(parents=True, exist_ok=True)
    storage = await connection.storage()
    dump = await connection.call(Snapshots.dump)()
    try:
        files = await _save_blocks(folder, dump["blocks"], storage)
    finally:
        await clean_up(connection.call(Snapshots.unpin)(dump["pin"]))
    state: SnapshotState = {"format": FORMAT, "tables": _plain(dump["tables"]), "blocks": files}
    _write(folder / INDEX, [memoryview(json.dumps({**state, "crc32": checksum(state)}).encode())])


async def _save_blocks(folder: Path, blocks: Mapping[int, Locator], storage: Storage) -> dict[str, BlockFile]:
    """Write one file per block, which the index keeps pinned until this is done."""
    files: dict[str, BlockFile] = {}
    for number, locator in blocks.items():
        (view,) = await storage.read([locator], None)
        if view is None:
            raise DataLost(f"a block of {locator.num_bytes:,} bytes is no longer on node {locator.node}")
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


def _write(path: Path, pieces: Sequence[memoryview]) -> None:
    """Write to a temporary name, sync, then rename, so that the file is whole or absent. `OutOfSpace` if it is full."""
    temporary = path.with_name(path.name + ".tmp")
    with space.explained(path.parent, sum(len(piece) for piece in pieces)):
        try:
            with open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _plain(tables: Mapping[str, TableDump]) -> dict[str, TableDump]:
    """The tables with lists for arrays."""
    return {
        name: {
            "keys": table["keys"],
            "tags": table["tags"],
            "columns": {
                column: [np.asarray(part).tolist() for part in cells] for column, cells in table["columns"].items()
            },
        }
        for name, table in tables.items()
    }


async def load(folder: Path, connection: Connection) -> None:
    """Restore a snapshot in place of everything that the queue holds."""
    storage, budget_bytes = await connection.storage(), connection.spec.budget_bytes
    state = read_index(folder)
    total = sum(entry["bytes"] for entry in state["blocks"].values())
    if total > budget_bytes:
        raise CheckpointError(
            f"{folder} holds {total:,} bytes, more than the queue's budget of {budget_bytes:,} bytes per node; "
            "raise storage.budget_gb"
        )
    written: dict[int, Locator] = {}
    cuts: dict[int, Cut] = {}
    is_sent = False
    try:
        for number, entry in state["blocks"].items():
            block = read_block(folder, entry)
            cuts[int(number)] = Cut(block.layout.num_rows, frozenset(block.layout.fields))
            locator = written[int(number)] = await storage.write(block)
            await connection.call(Snapshots.expect)(locator)
        check_places(state["tables"], cuts)
        is_sent = True
        await connection.call(Snapshots.load)(state["tables"], written)
    except BaseException as error:
        if not is_sent or isinstance(error, CheckpointError):  # otherwise the index may refer to the blocks
            storage.free(list(written.values()))
            await clean_up(connection.call(Snapshots.forget)([locator.block for locator in written.values()]))
        raise
