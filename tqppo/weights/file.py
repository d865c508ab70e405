"""safetensors files written tensor by tensor through a memory map: no second copy of the model, pages reused.

Sharded tensors are made whole by a collective as their turn comes, so every rank walks through the
file and only one of them writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {  # as the file's header calls them
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
    """One tensor to write: what it looks like, and how to get it when its turn comes."""

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


def write(path: Path | None, entries: Sequence[Entry]) -> None:
    """Write all entries; without a path (on the other ranks) only fetch them, in the same order."""
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # aligned without gaps
    header = _header(entries)
    size = len(header) + sum(entry.num_bytes for entry in entries)
    mapped = None if path is None else _mapped(path, size)
    if mapped is not None:
        mapped[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    begin = len(header)
    for entry in entries:
        tensor = entry.fetch()
        if mapped is not None and entry.num_bytes:
            place = mapped[begin : begin + entry.num_bytes].view(entry.dtype).view(entry.shape)
            place.copy_(tensor)
        begin += entry.num_bytes


def _header(entries: Sequence[Entry]) -> bytes:
    described, begin = {}, 0
    for entry in entries:
        end = begin + entry.num_bytes
        described[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _mapped(path: Path, size: int) -> Tensor:
    """The file as bytes [size], made or resized if need be; a file of this size keeps its pages."""
    with open(path, "r+b" if path.exists() else "w+b") as file:
        file.truncate(size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


@contextmanager
def reading(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function name → tensor over the file, which is mapped, not read as a whole."""
    with ExitStack() as stack:
        file = stack.enter_context(safe_open(str(path), framework="pt"))
        yield file.get_tensor


def names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())
