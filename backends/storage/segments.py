"""Shared-memory files of one run on one node: read copy-on-write where they are, and written again.

A reader's lease is a shared `flock` for as long as it uses the bytes, and the kernel ends it with the process; a
file is written again only under an exclusive one. `live/FILE.BLOCK` holds a block, its place in the storage's words;
`free/SIZE-FILE` waits to be used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.blocks.block import Block, BlockView, Layout, parse

from .folders import SHARED, choose_parent, delete, parents, reap
from .mappings import Kept, LeasedFile, discard

SMALL = 256 * 1024  # bytes; what is smaller is read into private memory, and its file deleted: new pages cost little
TRIES = 40  # half a millisecond each, to read a file that somebody has locked
_MAX_WRITE = 1 << 30  # bytes per system call


class Segments:
    """The files of one run on this node. Any process of the node may hold one of these."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder, self.budget_bytes = folder, budget_bytes
        self._live, self._free = f"{folder}/live/", f"{folder}/free/"
        self._may_map = SHARED in folder.parents  # elsewhere a page may be missing when the disk is full
        self._read, self._written = Kept(), Kept()
        self._untrimmed = 0  # bytes of small files since free ones were counted
        self._lock = -1

    @staticmethod
    def create(name: str, budget_bytes: int, base: str = "") -> Segments:
        """Make the folder of a run on this node and own it until this process ends or `remove` is called."""
        for folder in parents(base):
            reap(folder)
        parent = choose_parent(budget_bytes, base)
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
        for parent in parents(base):
            if (parent / name / "live").is_dir():
                return Segments(parent / name, budget_bytes)
        return None

    def remove(self) -> None:
        delete(self.folder)
        self._read, self._written = Kept(), Kept()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, block: Block) -> str:
        """Place a block; answers where."""
        file = self._claim(block) or self._new(block)
        try:
            self._fill(file, block)
        except OSError as error:
            discard(self._live + _place(file.name, block))
            raise QueueError(f"node out of memory for the queue: {self.folder}: {error.strerror}") from error
        finally:
            self._written.take_back(file)
        return _place(file.name, block)

    def _fill(self, file: LeasedFile, block: Block) -> None:
        if self._is_mapped_for(file, block.num_bytes):
            _copy(block, file.map(block.num_bytes, mmap.ACCESS_WRITE))
            os.utime(file.handle)  # as a write would have done
            return
        file.memory = None  # it may not cover all of the file any more
        try:
            _write_all(block, file.handle)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._spare():
                raise
            self._trim(0, limit=0)
            _write_all(block, file.handle)

    def _claim(self, block: Block) -> LeasedFile | None:
        """A free file of about the right size that nobody reads any more, opened and locked; if possible, mapped."""
        wanted = block.num_bytes
        if wanted < SMALL:
            return None
        fitting = sorted(
            (_name(free) not in self._written, abs(size - wanted) + (size < wanted) * wanted, free)
            for size, free in self._spare()
            if wanted // 2 <= size <= wanted + wanted // 4
        )
        return next((file for *_, free in fitting if (file := self._claimed(free, block)) is not None), None)

    def _claimed(self, free: str, block: Block) -> LeasedFile | None:
        name, place = _name(free), self._live + _place(_name(free), block)
        try:
            os.rename(self._free + free, place)  # before it is locked: a block that somebody has published never is
            file = self._written.take(name) or LeasedFile(place, name)
        except FileNotFoundError:  # claimed by somebody else
            return None
        if file.lock(fcntl.LOCK_EX) and os.path.exists(place):  # unless it was swept meanwhile, as a block unknown
            return file
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, self._free + free)  # somebody still reads it
        self._written.take_back(file)
        return None

    def _is_mapped_for(self, file: LeasedFile, num_bytes: int) -> bool:
        """Whether to write by a mapping: as fast as memory once it is filled, slower than plain writes until then.

        Only within the file as it is: a page that cannot be had is an error in a write, and the end in a mapping.
        """
        if file.memory is not None:
            return len(file.memory) >= num_bytes
        return self._may_map and file.size() >= num_bytes and self._written.has_room()

    def _spare(self) -> list[tuple[int, str]]:
        return [(int(entry.partition("-")[0]), entry) for entry in os.listdir(self._free)]

    def _new(self, block: Block) -> LeasedFile:
        self._untrimmed += block.num_bytes
        if block.num_bytes >= SMALL or self._untrimmed > self.budget_bytes // 16:
            self._trim(block.num_bytes, limit=self.budget_bytes)
            self._untrimmed = 0
        name = uuid.uuid4().hex
        file = LeasedFile(self._live + _place(name, block), name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file.lock(fcntl.LOCK_EX)
        return file

    def _trim(self, num_bytes: int, limit: int) -> None:
        """Delete free files until so many bytes more are within the limit."""
        spare = sorted(self._spare())
        if not spare:
            return
        total = num_bytes + sum(size for size, _ in spare) + sum(size for _, size in self.files("live"))
        while spare and total > limit:
            size, name = spare.pop(0)
            discard(self._free + name)
            total -= size

    def free(self, place: str) -> None:
        path = self._live + place
        try:
            size = os.stat(path).st_size
            if size < SMALL:
                os.unlink(path)
            else:
                os.rename(path, f"{self._free}{size}-{_file(place)}")
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

    def read(self, place: str, block: str, num_bytes: int, columns: Sequence[str] | None = None) -> BlockView | None:
        """The block, if the file still holds it; the bytes of these columns (None: all) are the caller's to change.
        What is returned stays valid for as long as it is referenced."""
        file = self._read.take(_file(place)) or self._opened(place)
        if file is None or not self._lease(file, place):
            return None  # freed, or being written again
        memory = self._memory(file, place, num_bytes)
        layout = _layout(memory, block)
        if layout is None:
            self._read.take_back(file)
            return None
        if num_bytes >= SMALL:
            memory = self._read.lend(file, num_bytes, layout.spans(columns))
        return BlockView(layout, whole=memory, writable=True)

    def _lease(self, file: LeasedFile, place: str) -> bool:
        """Lock a file to read it. Whoever sweeps may have it for a moment; then the block is still there."""
        for _ in range(TRIES):
            if file.lock(fcntl.LOCK_SH):
                return True
            if not os.path.exists(self._live + place):
                return False
            time.sleep(0.0005)
        return False

    def _opened(self, place: str) -> LeasedFile | None:
        try:
            return LeasedFile(self._live + place, _file(place))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise QueueError(f"a block cannot be opened: {self._live}{place}: {error.strerror}") from error

    def _memory(self, file: LeasedFile, place: str, num_bytes: int) -> Any:
        """What a locked file holds: mapped, or copied if it is small. Nothing, if it is not this block's any more."""
        try:
            size = os.stat(self._live + place).st_size  # by name, because a kept file may hold another by now
        except FileNotFoundError:
            size = 0
        if size < num_bytes:
            return b""
        if num_bytes >= SMALL:
            return file.map(num_bytes, mmap.ACCESS_COPY)
        data = np.empty(num_bytes, np.uint8)
        os.preadv(file.handle, [data.data], 0)
        return data


def _layout(data: Any, block: str) -> Layout | None:
    try:
        layout = parse(data)
    except QueueError:
        return None
    return layout if layout.block == block else None


def _place(name: str, block: Block) -> str:
    return f"{name}.{block.layout.block}"


def _file(place: str) -> str:
    return place.partition(".")[0]


def _name(free: str) -> str:
    return free.partition("-")[2]


def _copy(block: Block, memory: mmap.mmap) -> None:
    """The header comes last: a block that was cut short has none."""
    data = np.frombuffer(memory, np.uint8)
    (_, header), *pieces = block.pieces
    data[: header.nbytes] = 0
    for start, piece in pieces:
        data[start : start + piece.nbytes] = piece
    data[: header.nbytes] = header


def _write_all(block: Block, handle: int) -> None:
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
