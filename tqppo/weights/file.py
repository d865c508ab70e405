"""safetensors files: written tensor by tensor through a memory map, and read through one.

Writing needs no second copy of the model and reuses the pages of an existing file. A sharded tensor is gathered by a
collective when it is written, so every rank walks through the file and only one of them has a path to write to.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from tqppo.errors import OutOfSpace
from tqppo.space import Digest, allocate, explained, sync, write_whole
from tqppo.weights.checksum import checksum

MODEL_FILE = "model.safetensors"
DTYPES = {  # by their names in a file's header
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write: its name, type and shape, and a function that returns it when it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @staticmethod
    def of(name: str, tensor: Tensor) -> Entry:
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


_deferred: ContextVar[list[OutOfSpace] | None] = ContextVar("deferred", default=None)


@contextmanager
def deferring() -> Iterator[list[OutOfSpace]]:
    """Within this context a `write` that does not fit raises nothing; the yielded list has the errors."""
    errors: list[OutOfSpace] = []
    token = _deferred.set(errors)
    try:
        yield errors
    finally:
        _deferred.reset(token)


def write(
    path: Path | None, entries: Sequence[Entry], *, with_checksums: bool = False, is_private: bool = False
) -> dict[str, str]:
    """Write all entries. Without a path, as on all ranks but one, fetch them in the same order and write nothing.

    Only this user can read a file that is made private.
    Returns the checksums of what it wrote if they are asked for; they are computed where the tensors are.

    `OutOfSpace` is raised after everything is fetched, because the other ranks take part in every fetch.
    """
    checksums: dict[str, str] = {}

    def look(entry: Entry, tensor: Tensor) -> None:
        checksums[entry.name] = checksum(tensor.to(entry.dtype))

    looking = look if with_checksums and path is not None else None
    _write(path, _in_order(entries), {}, is_private=is_private, look=looking)
    return checksums


def write_hashed(path: Path, entries: Sequence[Entry], about: Mapping[str, str]) -> Digest:
    """Write all entries with the texts `about` them. The bytes are hashed as they are written, and not read again."""
    entries, sha256 = _in_order(entries), hashlib.sha256()
    size = _write(path, entries, about, hash_bytes=lambda written: sha256.update(written.numpy().data))
    return Digest(size, sha256.hexdigest())


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # aligned without gaps


def _write(
    path: Path | None,
    entries: Sequence[Entry],
    about: Mapping[str, str],
    *,
    is_private: bool = False,
    look: Callable[[Entry, Tensor], None] | None = None,
    hash_bytes: Callable[[Tensor], None] | None = None,
) -> int:
    """Write a file, or without a path only fetch. Returns its size."""
    header = _header(entries, about)
    size = len(header) + sum(entry.num_bytes for entry in entries)
    mapped, failures = None, []
    if path is not None:
        try:
            mapped = _map_to_write(path, size, is_private)
        except OutOfSpace as error:
            failures.append(error)
    _fill(mapped, header, entries, look, hash_bytes)
    if path is not None and mapped is not None:
        try:
            with explained(path.parent, size):
                sync(path)  # a network file system reports only now, and only to this process, that a write failed
        except OutOfSpace as error:
            failures.append(error)
    _report(failures)
    return size


def write_beside(path: Path, data: bytes) -> None:
    """Write a small file that belongs to the tensors. What does not fit is raised, or deferred, as by `write`."""
    try:
        write_whole(path, data)
    except OutOfSpace as error:
        _report([error])


def _report(failures: list[OutOfSpace]) -> None:
    deferred = _deferred.get()
    if failures and deferred is None:
        raise failures[0]
    if deferred is not None:
        deferred += failures


def _fill(
    mapped: Tensor | None,
    header: bytes,
    entries: Sequence[Entry],
    look: Callable[[Entry, Tensor], None] | None,
    hash_bytes: Callable[[Tensor], None] | None,
) -> None:
    begin = len(header)
    if mapped is not None:
        mapped[:begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if hash_bytes is not None:
            hash_bytes(mapped[:begin])
    for entry in entries:
        tensor = entry.fetch()
        if look is not None and mapped is not None:
            look(entry, tensor)
        if mapped is not None and entry.num_bytes:
            place = mapped[begin : begin + entry.num_bytes]
            place.view(entry.dtype).view(entry.shape).copy_(tensor)
            if hash_bytes is not None:
                hash_bytes(place)
        begin += entry.num_bytes


def _header(entries: Sequence[Entry], about: Mapping[str, str]) -> bytes:
    described, begin = {}, 0
    for entry in entries:
        end = begin + entry.num_bytes
        described[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt", **about}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _map_to_write(path: Path, size: int, is_private: bool) -> Tensor:
    """The file as writable bytes [size], created or resized if necessary."""
    allocate(path, size, is_private=is_private)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in a file: its type, its shape, and the bytes it occupies."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int

    def fits(self) -> bool:
        """Whether the bytes are as many as the type and the shape need."""
        is_shape = isinstance(self.shape, list) and all(type(size) is int and size >= 0 for size in self.shape)
        return is_shape and self.end - self.begin == self.dtype.itemsize * prod(self.shape)

    def rows(self, file: Path, begin: int, count: int) -> Tensor:
        """Some rows of the tensor, read from its file without the rest of it."""
        if not count:
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        row_bytes = (self.end - self.begin) // max(1, self.shape[0])
        content = torch.empty(count * row_bytes, dtype=torch.uint8)  # torch's own: a worker at rest gives it back
        with file.open("rb") as opened:
            opened.seek(self.begin + begin * row_bytes)
            if opened.readinto(content.numpy().data) != len(content):
                raise ValueError(f"{file} is shorter than its header says")
        return content.view(self.dtype).view(count, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A safetensors file mapped for reading. Tensors point into the file and keep the mapping alive."""

    identity: tuple[int, int, int]  # device, inode, size
    header: bytes
    content: mmap.mmap
    places: dict[str, Place]

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Raises OSError if the file cannot be mapped, ValueError if it is not a safetensors file."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            header, places = read_header(file)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls((status.st_dev, status.st_ino, status.st_size), header, content, places)

    def tensor(self, name: str) -> Tensor:
        place = self.places[name]
        if place.begin == place.end:
            return torch.empty(place.shape, dtype=place.dtype)
        return self.stretch(place.begin, place.end).view(place.dtype).view(place.shape)

    def stretch(self, begin: int, end: int) -> Tensor:
        """A stretch of the file as bytes [end − begin]."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # readers do not write to it
            return torch.frombuffer(self.content, dtype=torch.uint8, count=end - begin, offset=begin)


def read_header(file: BinaryIO) -> tuple[bytes, dict[str, Place]]:
    """The header of an open safetensors file, and its tensors by name, in the order of their bytes.

    Raises ValueError if the header is damaged, has an unknown dtype, or says that the file is longer than it is.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, num_bytes))  # a damaged length may be larger than the memory
    try:
        places = _places(header)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not understood: {error!r}") from error
    if any(place.end > num_bytes for place in places.values()):
        raise ValueError("it is shorter than its header says")
    if wrong := [name for name, place in places.items() if not place.fits()]:
        raise ValueError(f"its header gives tensor {wrong[0]!r:.80} another number of bytes than its shape has")
    return header, places


def _places(header: bytes) -> dict[str, Place]:
    start = 8 + len(header)
    described = {name: each for name, each in json.loads(header).items() if name != "__metadata__"}
    places = {
        name: Place(DTYPES[each["dtype"]], each["shape"], *(start + offset for offset in each["data_offsets"]))
        for name, each in described.items()
    }
    return dict(sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)))


@contextmanager
def reading(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function from a tensor's name to a copy of it."""
    with safe_open(str(path), framework="pt") as file:
        yield file.get_tensor


def names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())
