"""The memory layout of one put: a header, then every column's bytes, each at a multiple of 64. No pickle.

    magic, header's length | JSON header | lengths of ragged rows, values … (per column)

A ragged column keeps its rows one after the other, token by token, and int64 offsets into them; a JSON column
is ragged UTF-8. The header has every column's dtype, shape and position, so a block can be read on its own, from
shared memory, a socket or a file.
"""

from __future__ import annotations

import json
import mmap
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tqppo.errors import QueueError

ALIGN = 64
MAGIC = b"TQPPOB1\n"
_PREFIX = struct.Struct("<8sII")  # magic, header's length, rows

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap | Bytes


@dataclass(frozen=True, slots=True)
class Field:
    """Where one column is in a block, and what it is. `kind`: dense, ragged or json."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]  # of one dense row, or of one token of a ragged one
    ragged_dim: int
    num_bytes: int
    start: int = 0  # of the values, from the start of the block
    offsets: int = -1  # of the row offsets; -1: dense

    def pieces(self, num_rows: int) -> list[tuple[int, int]]:
        """(start, bytes) of the offsets, if the column is not dense, and of the values, if there are any."""
        offsets = [] if self.offsets < 0 else [(self.offsets, 8 * (num_rows + 1))]
        return offsets + ([(self.start, self.num_bytes)] if self.num_bytes else [])


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed header."""

    block: str  # unique name of the block
    num_rows: int
    num_bytes: int
    fields: Mapping[str, Field]
    header: bytes = field(repr=False)

    def pieces(self, columns: Iterable[str] | None = None) -> list[tuple[int, int]]:
        """(start, bytes) of all offsets and values of some columns (None: all), in ascending order."""
        wanted = set(self.fields if columns is None else columns)
        fields = [field for name, field in self.fields.items() if name in wanted]
        return [piece for field in fields for piece in field.pieces(self.num_rows)]

    def spans(self, columns: Iterable[str] | None = None) -> list[tuple[int, int]]:
        """(start, stop) of the memory of some columns; adjacent pieces are joined."""
        spans: list[tuple[int, int]] = []
        for start, size in self.pieces(columns):
            is_next = spans and start - spans[-1][1] < ALIGN
            first = spans.pop()[0] if is_next else start
            spans.append((first, start + size))
        return spans


@dataclass(frozen=True, slots=True)
class Block:
    """What a storage writes: the layout, and (start, bytes) of the header and of every piece, in ascending order.
    Padding fills the gaps between them."""

    layout: Layout
    pieces: Sequence[tuple[int, Bytes]]

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    @staticmethod
    def of(data: Bytes) -> Block:
        """A block from its bytes in one array, such as the contents of a file."""
        layout = parse(data)
        header = len(layout.header)
        return Block(layout, [(start, data[start : start + size]) for start, size in [(0, header), *layout.pieces()]])

    def renamed(self) -> Block:
        """The same block under a new name, so that a storage can hold both."""
        old, new = self.layout.block.encode(), uuid.uuid4().hex.encode()
        header = self.layout.header.replace(old, new, 1)
        return Block(parse(header), [(0, np.frombuffer(header, np.uint8)), *self.pieces[1:]])

    def flat(self) -> Bytes:
        """The whole block in one array, for storages that need a single object."""
        out = np.zeros(self.num_bytes, np.uint8)
        for start, piece in self.pieces:
            out[start : start + piece.nbytes] = piece
        return out


@dataclass(frozen=True, slots=True)
class Encoded:
    """One column in bytes, not placed yet. `offsets` is None for a dense column."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    ragged_dim: int
    values: Bytes
    offsets: np.ndarray | None


def build(columns: Sequence[Encoded], num_rows: int) -> Block:
    """Lay columns out in a new block."""
    name = uuid.uuid4().hex
    header = _header(name, num_rows, columns)
    layout = parse(header)
    pieces: list[tuple[int, Bytes]] = [(0, np.frombuffer(header, np.uint8))]
    for column in columns:
        placed = layout.fields[column.name]
        if column.offsets is not None:
            pieces.append((placed.offsets, np.ascontiguousarray(column.offsets, np.int64).view(np.uint8)))
        if column.values.nbytes:
            pieces.append((placed.start, column.values))
    return Block(layout, pieces)


def _header(name: str, num_rows: int, columns: Sequence[Encoded]) -> bytes:
    described = [[c.name, c.kind, c.dtype, c.shape, c.ragged_dim, c.values.nbytes] for c in columns]
    text = json.dumps([name, described], separators=(",", ":")).encode()
    return _PREFIX.pack(MAGIC, len(text), num_rows) + text


def parse(start: Buffer) -> Layout:
    """The layout of a block, from its header; further bytes are ignored."""
    view = memoryview(start)  # type: ignore[arg-type] # numpy's stubs do not say that arrays are buffers
    if view.nbytes < _PREFIX.size:
        raise QueueError(f"{view.nbytes} bytes are too few for a block")
    magic, length, num_rows = _PREFIX.unpack_from(view)
    end = _PREFIX.size + length
    if magic != MAGIC or view.nbytes < end:
        raise QueueError("these bytes do not start with the header of a block")
    name, described = json.loads(bytes(view[_PREFIX.size : end]))
    fields, position = {}, aligned(end)
    for column, kind, dtype, shape, ragged_dim, num_bytes in described:
        offsets = -1
        if kind != "dense":
            offsets, position = position, aligned(position + 8 * (num_rows + 1))
        fields[column] = Field(column, kind, dtype, tuple(shape), ragged_dim, num_bytes, position, offsets)
        position = aligned(position + num_bytes)
    return Layout(name, num_rows, position, fields, bytes(view[:end]))


def aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN


class BlockView:
    """A block opened for reading: its layout, and either all its bytes or some pieces, by where they start.

    `writable`: the memory is private or copy-on-write, so tensors over it can be given to callers without a copy.
    """

    __slots__ = ("_pieces", "_whole", "layout", "writable")

    def __init__(
        self, layout: Layout, *, whole: Bytes | None = None, pieces: Mapping[int, Bytes] | None = None, writable: bool
    ) -> None:
        self.layout, self.writable = layout, writable
        self._whole, self._pieces = whole, pieces or {}

    def piece(self, start: int, num_bytes: int) -> Bytes:
        if self._whole is not None:
            return self._whole[start : start + num_bytes]
        return self._pieces[start] if num_bytes else np.empty(0, np.uint8)

    def values(self, name: str) -> Bytes:
        where = self.layout.fields[name]
        return self.piece(where.start, where.num_bytes)

    def offsets(self, name: str) -> np.ndarray:
        return self.piece(self.layout.fields[name].offsets, 8 * (self.layout.num_rows + 1)).view(np.int64)
