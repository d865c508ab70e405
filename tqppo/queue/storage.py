"""The contract between the queue and its storages. `tqppo backends check storage NAME` tests it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from tqppo.queue.blocks.block import Block, BlockView

FOLDER_PREFIX = "tqppo-queue-"  # of folders in shared memory; those of dead owners are removed at the end of any run


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What a storage is made from; the same on every node."""

    run: str  # unique name of the queue, part of every name that the storage uses outside its process
    budget_bytes: int  # per node
    timeout_s: float = 60.0
    dir: str = ""  # folder for shared memory; empty: the storage chooses
    token: str = ""  # secret of the run, for servers that listen on a port
    distributed: bool = True  # False: one process, no Ray


@dataclass(frozen=True, slots=True)
class Locator:
    """Where a block is. The meaning of `place` is up to the storage."""

    node: str
    block: str
    num_bytes: int
    place: str = ""


class Storage(Protocol):
    """Keeps the bytes of immutable blocks. Every process has its own object, made from the same spec.

    - The constructor starts nothing. The index's process calls `start(node)` for each node that joins, its own node
      first, before any process on that node writes.
    - `write` places a block on this process's node. When it returns, the block outlives this process.
    - `read` opens blocks with at least the columns asked for (None: all), in the same order. A block that does not
      exist is None in the result; a storage that does not answer raises `DataLost` or `DeadlineExceeded`.
    - `free` frees the memory of blocks, never waits, and ignores blocks that are free already. Memory that a reader
      still uses is not written before the reader drops it.
    - `sweep`, in the index's process, frees what was written long ago on any node and is not among `known`: blocks of
      producers that died before they could publish them. It never waits.
    - `close`, in the index's process, leaves no process, file or object behind; it may be called twice.

    Coroutines await nothing but `tqppo.queue.link.calls.Reply`, so that blocking callers can drive them.
    """

    def __init__(self, spec: StorageSpec) -> None: ...
    async def start(self, node: str) -> None: ...
    async def write(self, block: Block) -> Locator: ...
    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]: ...
    def free(self, locators: Sequence[Locator]) -> None: ...
    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Some rows and columns of one block."""

    locator: Locator
    columns: tuple[str, ...]
    rows: np.ndarray  # ascending, each once


@runtime_checkable
class RowStorage(Protocol):
    """What a storage may offer in addition: to send rows instead of whole columns.

    The queue calls `read_rows` for blocks on other nodes. Each answer is a block with just the rows and columns asked
    for, in their order (see `gather.excerpt`); None if there is no such block. Failures are as those of `read`.
    """

    async def read_rows(self, requests: Sequence[RowRequest]) -> list[BlockView | None]: ...
