"""Shared-memory files of one run on one node: written with plain writes, mapped copy-on-write, used again.

A reader's lease is a shared `flock` that lives as long as its mapping, so the kernel ends it with the process; a
file is written again only under an exclusive one. `live/` holds blocks, `free/` files waiting to be used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.block import Block, BlockView, Layout, parse

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
COPY_BELOW = 128 * 1024  # smaller blocks are read into private memory: cheaper than a mapping
RECYCLE_ABOVE = 256 * 1024  # smaller files are deleted: new pages cost little
ENOUGH = 512 << 20  # less free shared memory than this (and than the budget) is too small to be useful
_MAX_WRITE = 1 << 30  # bytes per system call


class Segments:
    """The files of one run on this node. Any process of the node may hold one of these."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder, self.budget_bytes = folder, budget_bytes
        self._live, self._free = f"{folder}/live/", f"{folder}/free/"
        self._lock = -1

    @staticmethod
    def create(name: str, budget_bytes: int, base: str = "") -> Segments:
        """Make the folder of a run on this node and own it until this process ends or `remove` is called."""
        parent = choose_parent(budget_bytes, base)
        reap(parent)
        hidden = parent / f".tqppo-{uuid.uuid4().hex}"  # under its name only once it is locked: never reaped half made
        for part in (hidden, hidden / "live", hidden / "free"):
            part.mkdir(mode=0o700)
        lock = os.open(hidden / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
        os.rename(hidden, parent / name)
        segments = Segments(parent / name, budget_bytes)
        segments._lock = lock
        return segments

    @staticmethod
    def find(name: str, budget_bytes: int, base: str = "") -> Segments | None:
        """The folder that the run's owner made on this node."""
        for parent in _parents(base):
            if (parent / name / "live").is_dir():
                return Segments(parent / name, budget_bytes)
        return None

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, block: Block) -> str:
        """Place a block; answers the name of its file."""
        claimed = self._claim(block.num_bytes) if block.num_bytes >= RECYCLE_ABOVE else None
        name, handle = claimed or self._new(block.num_bytes)
        try:
            _write_all(handle, block)
        except OSError as error:
            os.unlink(self._live + name)
            raise QueueError(f"node out of memory for the queue: {self.folder}: {error.strerror}") from error
        finally:
            os.close(handle)
        return name

    def _claim(self, num_bytes: int) -> tuple[str, int] | None:
        """A free file of about this size that nobody reads any more, opened and locked."""
        fitting = sorted(
            (abs(size - num_bytes) + (size < num_bytes) * num_bytes, free)
            for size, free in self._spare()
            if num_bytes // 2 <= size <= 2 * num_bytes
        )
        for _, free in fitting:
            try:
                handle = os.open(self._free + free, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            name = free.partition("-")[2]
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(self._free + free, self._live + name)
                return name, handle
            except (BlockingIOError, FileNotFoundError):  # still read, or claimed by somebody else
                os.close(handle)
        return None

    def _spare(self) -> list[tuple[int, str]]:
        return [(int(entry.partition("-")[0]), entry) for entry in os.listdir(self._free)]

    def _new(self, num_bytes: int) -> tuple[str, int]:
        if num_bytes >= RECYCLE_ABOVE:
            self._trim(num_bytes)
        name = uuid.uuid4().hex
        handle = os.open(self._live + name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name, handle

    def _trim(self, num_bytes: int) -> None:
        """Delete free files until a new one fits into the budget."""
        spare = sorted(self._spare())
        if not spare:
            return
        total = num_bytes + sum(size for size, _ in spare) + sum(size for _, size in self.files("live"))
        while spare and total > self.budget_bytes:
            size, name = spare.pop(0)
            unlink(self._free + name)
            total -= size

    def free(self, name: str) -> None:
        path = self._live + name
        try:
            size = os.stat(path).st_size
            if size < RECYCLE_ABOVE:
                os.unlink(path)
            else:
                os.rename(path, f"{self._free}{size}-{name}")
        except FileNotFoundError:
            pass  # freed already

    def sweep(self, known: Collection[str], older_than_s: float) -> list[str]:
        """Free blocks that are not known and were written long ago, unless somebody is writing them."""
        swept = []
        for entry in os.scandir(self._live):
            if entry.name in known:
                continue
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - os.fstat(handle).st_mtime > older_than_s:
                        self.free(entry.name)
                        swept.append(entry.name)
                finally:
                    os.close(handle)
        return swept

    def files(self, part: str) -> Iterator[tuple[str, int]]:
        """Names and sizes of the files in `live` or `free`."""
        for entry in os.scandir(self.folder / part):
            try:
                yield entry.name, entry.stat().st_size
            except FileNotFoundError:
                continue

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, name: str, block: str, num_bytes: int) -> BlockView | None:
        """The block, if the file still holds it. What is returned stays valid for as long as it is referenced."""
        try:
            handle = os.open(self._live + name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            data = _private(handle, num_bytes) if num_bytes < COPY_BELOW else _mapped(handle, num_bytes)
        except BlockingIOError:
            return None  # being written again
        finally:
            os.close(handle)
        layout = _layout(data, block)
        return None if layout is None else BlockView(layout, whole=data, writable=True)


def _private(handle: int, num_bytes: int) -> np.ndarray:
    data = np.zeros(num_bytes, np.uint8)
    os.preadv(handle, [data.data], 0)
    return data


def _mapped(handle: int, num_bytes: int) -> np.ndarray:
    """Copy-on-write: the reader may change it, nobody else sees that. The mapping keeps a duplicate of the handle,
    and with it the lock, until the last array over it is gone."""
    if os.fstat(handle).st_size < num_bytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(handle, num_bytes, access=mmap.ACCESS_COPY), np.uint8)


def _layout(data: np.ndarray, block: str) -> Layout | None:
    try:
        layout = parse(data)
    except QueueError:
        return None
    return layout if layout.block == block else None


def _write_all(handle: int, block: Block) -> None:
    buffers: list[memoryview] = []
    position = 0
    for start, piece in block.pieces:
        if start > position:
            buffers.append(memoryview(bytes(start - position)))
        buffers.append(piece.data)
        position = start + piece.nbytes
    buffers.append(memoryview(bytes(block.num_bytes - position)))
    written = 0
    while buffers:
        batch = _first(buffers)
        count = os.pwritev(handle, batch, written)
        if count == 0 and any(len(buffer) for buffer in batch):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count
        _drop(buffers, count)


def _first(buffers: list[memoryview]) -> list[memoryview]:
    """As many buffers as one system call takes."""
    batch, size = [], 0
    for buffer in buffers[:512]:
        batch.append(buffer[: _MAX_WRITE - size])
        size += len(batch[-1])
        if size >= _MAX_WRITE:
            break
    return batch


def _drop(buffers: list[memoryview], count: int) -> None:
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# -- where, and what dead runs left ----------------------------------------------------------------------------------


def _parents(base: str) -> list[Path]:
    return [Path(base)] if base else [SHARED, Path(tempfile.gettempdir())]


def choose_parent(budget_bytes: int, base: str = "") -> Path:
    """Shared memory where there is enough of it, else the temporary folder; a given folder always."""
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
        return Path(base)
    fallback = Path(tempfile.gettempdir())
    if not os.access(SHARED, os.W_OK):
        log.warning("%s is not there: the queue keeps its blocks in %s, which is slower", SHARED, fallback)
        return fallback
    spare = shutil.disk_usage(SHARED).free
    if spare < min(budget_bytes, ENOUGH):
        log.warning("%s has only %d MB left: the queue keeps its blocks in %s", SHARED, spare >> 20, fallback)
        return fallback
    if spare < budget_bytes:
        log.warning("%s has %d MB left, less than the budget of %d MB", SHARED, spare >> 20, budget_bytes >> 20)
    return SHARED


def reap(parent: Path) -> list[str]:
    """Delete what runs left behind whose owner is dead: its lock can be taken."""
    reaped = []
    for folder in [*parent.glob("tqppo-*"), *_abandoned(parent)]:
        try:
            lock = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not one of ours, somebody else's, or just gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            reaped.append(folder.name)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    if reaped:
        log.info("removed the shared memory of dead runs: %s", ", ".join(reaped))
    return reaped


def remove_run(prefix: str, base: str = "") -> None:
    """Delete all folders of a run on this machine."""
    for parent in _parents(base):
        for folder in parent.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _abandoned(parent: Path) -> list[Path]:
    """Folders whose maker died before it named them."""
    old = time.time() - 600
    return [folder for folder in parent.glob(".tqppo-*") if folder.stat().st_mtime < old]
