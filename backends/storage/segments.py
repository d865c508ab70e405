"""Shared-memory files of one run on one node: mapped copy-on-write by readers, and reused for later blocks.

A reader holds a shared `flock`, its lease, for as long as it uses the bytes; the kernel releases it when the process
ends. A file is reused only under an exclusive lock. `live/FILE.BLOCK` holds a block and is the `place` of its locator;
`free/SIZE-FILE` is free for reuse.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from tqppo.errors import QueueError
from tqppo.processes import reaper
from tqppo.queue.blocks.block import Block, BlockView, Buffer, Bytes, Layout, parse
from tqppo.space import SHARED_MEMORY

from .folders import choose_parent, discard_files, parents, reap
from .mappings import IdleFiles, LeasedFile, discard

SMALL_BYTES = 256 * 1024  # a smaller block is copied by readers and its file is not reused: its pages cost little
LOCK_TRIES = 40  # half a millisecond apart, to read a file that another process has locked
_MAX_WRITE = 1 << 30  # bytes per system call


class Segments:
    """The files of one run on this node; every process that reads or writes them has its own object."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder, self.budget_bytes = folder, budget_bytes
        self._live, self._free = f"{folder}/live/", f"{folder}/free/"
        # A copy-on-write file system can be full even for allocated pages.
        self._may_map = SHARED_MEMORY in folder.parents
        self._read, self._written = IdleFiles(), IdleFiles()
        self._untrimmed = 0  # bytes of small files since the last trim
        self._claim: reaper.Claim | None = None

    @staticmethod
    def create(name: str, budget_bytes: int, base: str = "") -> Segments:
        """Make the folder of a run on this node and own it until this process ends or `remove` is called."""
        for folder in parents(base):
            reap(folder)
        claim = reaper.claim(choose_parent(budget_bytes, base) / name)
        for part in ("free", "live"):  # `find` looks for the last one
            (claim.folder / part).mkdir(mode=0o700)
        segments = Segments(claim.folder, budget_bytes)
        segments._claim = claim
        return segments

    @staticmethod
    def find(name: str, budget_bytes: int, base: str = "") -> Segments | None:
        """The files in the folder that the run's owner made on this node; None if there is no such folder."""
        for parent in parents(base):
            if (parent / name / "live").is_dir():
                return Segments(parent / name, budget_bytes)
        return None

    def remove(self) -> None:
        """Delete the folder, if this process owns it."""
        self._read, self._written = IdleFiles(), IdleFiles()
        if self._claim is not None:
            self._claim.release(discard_files)
            self._claim = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, block: Block) -> str:
        """Write a block; returns its place."""
        file = self._reuse(block) or self._new(block)
        try:
            self._fill(file, block)
        except OSError as error:
            discard(self._live + _place(file.name, block))
            raise _out_of_memory(self.folder, block.num_bytes, error) from error
        finally:
            self._written.take_back(file)
        return _place(file.name, block)

    def _fill(self, file: LeasedFile, block: Block) -> None:
        """Write a block to a file; if the disk is full, once more after all free files are deleted."""
        try:
            self._copy_into(file, block)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._spare():
                raise
            self._trim(0, limit=0)
            self._copy_into(file, block)

    def _copy_into(self, file: LeasedFile, block: Block) -> None:
        if self._is_mapped_for(file, block.num_bytes):
            _copy(block, file.map(block.num_bytes, mmap.ACCESS_WRITE))
            os.utime(file.handle)  # writes through a mapping do not set the time that `sweep` reads
        else:
            file.memory = None  # the file may grow beyond it
            _write_all(block, file.handle)

    def _reuse(self, block: Block) -> LeasedFile | None:
        """A free file of about the right size without readers, opened and locked; preferably one that is mapped."""
        wanted = block.num_bytes
        if wanted < SMALL_BYTES:
            return None
        fitting = sorted(
            (_name(free) not in self._written, abs(size - wanted) + (size < wanted) * wanted, free)
            for size, free in self._spare()
            if wanted // 2 <= size <= wanted + wanted // 4
        )
        return next((file for *_, free in fitting if (file := self._taken(free, block)) is not None), None)

    def _taken(self, free: str, block: Block) -> LeasedFile | None:
        name, place = _name(free), self._live + _place(_name(free), block)
        try:
            os.rename(self._free + free, place)  # before locking: a published block is never locked by a writer
            file = self._written.take(name) or LeasedFile(place, name)
        except FileNotFoundError:  # another writer took it
            return None
        if file.lock(fcntl.LOCK_EX) and os.path.exists(place):  # a sweep may have freed it, as an unknown block
            return file
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, self._free + free)  # a reader has a lease
        self._written.take_back(file)
        return None

    def _is_mapped_for(self, file: LeasedFile, num_bytes: int) -> bool:
        """Whether to write through a mapping: faster than a system call once its pages are filled, slower before.

        Only within the current size of the file, because growing it can fail.
        """
        if file.memory is not None:
            return len(file.memory) >= num_bytes
        return self._may_map and file.size() >= num_bytes and self._written.has_room()

    def _spare(self) -> list[tuple[int, str]]:
        return [(int(entry.partition("-")[0]), entry) for entry in os.listdir(self._free)]

    def _new(self, block: Block) -> LeasedFile:
        self._untrimmed += block.num_bytes
        if block.num_bytes >= SMALL_BYTES or self._untrimmed > self.budget_bytes // 16:
            self._trim(block.num_bytes, limit=self.budget_bytes)
            self._untrimmed = 0
        name = uuid.uuid4().hex
        file = LeasedFile(self._live + _place(name, block), name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file.lock(fcntl.LOCK_EX)
        return file

    def _trim(self, num_bytes: int, limit: int) -> None:
        """Delete free files until there is room for this many bytes within the limit."""
        spare = sorted(self._spare())
        if not spare:
            return
        total = num_bytes + sum(size for size, _ in spare) + sum(size for _, size in self.files("live"))
        while spare and total > limit:
            size, name = spare.pop(0)
            discard(self._free + name)
            total -= size

    def free(self, place: str) -> None:
        """Make the file of a block free for reuse; a small file is deleted. A place that is free already is ignored."""
        path = self._live + place
        try:
            size = os.stat(path).st_size
            if size < SMALL_BYTES:
                os.unlink(path)
            else:
                os.rename(path, f"{self._free}{size}-{_file(place)}")
        except FileNotFoundError:
            pass

    def sweep(self, known: Collection[str], older_than_s: float) -> list[str]:
        """Free blocks that are not known and were written long ago, unless they are locked; returns their places."""
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
        """A block, or None if it was freed. The caller may change the bytes of these columns (None: of all).
        The memory stays valid for as long as the view is referenced."""
        file = self._read.take(_file(place)) or self._opened(place)
        if file is None or not self._lease(file, place):
            return None  # freed, or being reused
        memory = self._memory(file, place, num_bytes)
        layout = None if memory is None else _layout(memory, block)
        if memory is None or layout is None:
            self._read.take_back(file)
            return None
        if isinstance(memory, mmap.mmap):
            memory = self._read.lend(file, num_bytes, layout.spans(columns))
        return BlockView(layout, whole=memory, writable=True)

    def _lease(self, file: LeasedFile, place: str) -> bool:
        """Lock a file for reading. A sweep may have it locked for a moment although the block is still there."""
        for _ in range(LOCK_TRIES):
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

    def _memory(self, file: LeasedFile, place: str, num_bytes: int) -> mmap.mmap | Bytes | None:
        """The contents of a locked file: mapped, or copied if they are small. None if the file was reused."""
        try:
            size = os.stat(self._live + place).st_size  # by name, because an idle file may hold another block by now
        except FileNotFoundError:
            size = 0
        if size < num_bytes:
            return None
        if num_bytes >= SMALL_BYTES:
            return file.map(num_bytes, mmap.ACCESS_COPY)
        data = np.empty(num_bytes, np.uint8)
        os.preadv(file.handle, [data.data], 0)
        return data


def _out_of_memory(folder: Path, num_bytes: int, error: OSError) -> QueueError:
    free = shutil.disk_usage(folder).free
    return QueueError(
        f"node out of memory for the queue: a block needs {num_bytes:,} bytes, and {folder} has {free:,} free "
        f"({error.strerror})"
    )


def _layout(data: Buffer, block: str) -> Layout | None:
    """The layout of this block; None if the bytes are of another one."""
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
    """Write the header last, so that a block that was cut short has none."""
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
    """The first buffers, limited to what one system call can write."""
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
