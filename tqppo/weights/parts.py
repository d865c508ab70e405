"""Tensors in parts: each rank writes the rows that it holds into a file of its own; any number of ranks reads them.

A single rank writes `model.safetensors`, the second of four `model-00002-of-00004.safetensors`. The header of a part
says with which row of its tensor each stretch begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from tqppo.errors import CheckpointError
from tqppo.space import Digest
from tqppo.weights import file as tensorfile
from tqppo.weights.file import Entry, Place
from tqppo.weights.shards import is_sharded, own_rows, rows_of, sharded_like

BEGINS = "first_rows"  # in the header: the first row of each stretch that is not the whole tensor's beginning


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors to write, with texts `about` them in its header."""

    name: str
    entries: list[Entry]
    about: Mapping[str, str] = field(default_factory=dict)

    def copied(self) -> TensorFile:
        """The same file, of tensors in host memory that nothing changes any more."""
        return replace(self, entries=[Entry.of(each.name, each.fetch().to("cpu", copy=True)) for each in self.entries])

    def write(self, folder: Path) -> dict[str, Digest]:
        """Returns the file's digest by its name."""
        return {self.name: tensorfile.write_hashed(folder / self.name, self.entries, self.about)}


def part_of(kind: str, tensors: Mapping[str, Tensor], *, rank: int = 0, size: int = 1) -> TensorFile:
    """The file for what this rank holds of the tensors, none of which another rank writes too."""
    found = {name: rows_of(tensor) for name, tensor in tensors.items()}
    own = {
        name: rows
        for name, rows in found.items()
        if rows.count and rows.is_first_copy and (rank == 0 or is_sharded(tensors[name]))
    }
    begins = {name: rows.begin for name, rows in own.items() if rows.begin}
    entries = [Entry.of(name, own_rows(tensors[name])) for name in own]
    name = f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"
    return TensorFile(name, entries, {BEGINS: json.dumps(begins)} if begins else {})


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent rows of a tensor, in one file."""

    begin: int
    file: Path
    place: Place

    @property
    def count(self) -> int:
        return self.place.shape[0] if self.place.shape else 1


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors in the files of all ranks that saved them."""

    folder: Path
    stretches: dict[str, list[Stretch]]

    @classmethod
    def open(cls, folder: Path, kind: str) -> Parts:
        """Raises `CheckpointError` if a rank's part is missing or damaged."""
        stretches: dict[str, list[Stretch]] = {}
        for file in _files(folder, kind):
            try:
                found = _stretches(file)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from None
            for name, stretch in found.items():
                stretches.setdefault(name, []).append(stretch)
        for several in stretches.values():
            several.sort(key=lambda stretch: stretch.begin)
        return cls(folder, stretches)

    @property
    def names(self) -> list[str]:
        return list(self.stretches)

    def like(self, name: str, other: Tensor) -> Tensor:
        """This rank's share of a tensor, sharded as `other`; no rank reads more than its rows."""
        own = rows_of(other)
        return sharded_like(self._rows(name, own.begin, own.count, other.shape), other)

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        shape = self.stretches[name][0].place.shape
        count = sum(stretch.count for stretch in self.stretches[name])
        return self._rows(name, 0, count, torch.Size([count, *shape[1:]] if shape else []))

    def _rows(self, name: str, begin: int, count: int, shape: torch.Size) -> Tensor:
        """Some rows of a tensor that has this shape."""
        self._check(name, shape)
        pieces = []
        for stretch in self.stretches[name]:
            first, last = max(begin, stretch.begin), min(begin + count, stretch.begin + stretch.count)
            if first < last:
                pieces.append(_read(stretch, first - stretch.begin, last - first))
        if not pieces:
            return torch.empty(0, *shape[1:], dtype=self.stretches[name][0].place.dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _check(self, name: str, shape: torch.Size) -> None:
        """Raise unless the stretches are, one after the other, a tensor of this shape."""
        end = 0
        for stretch in self.stretches[name]:
            if stretch.begin != end:
                raise CheckpointError(
                    f"{self.folder} lacks rows {end} to {stretch.begin} of {name!r}, or has them twice"
                )
            if tuple(stretch.place.shape[1:]) != tuple(shape[1:]):
                raise CheckpointError(f"{stretch.file} has {name!r} in another shape than the model")
            end += stretch.count
        if end != (shape[0] if shape else 1):
            raise CheckpointError(f"{self.folder} has {end} rows of {name!r}, and the model {shape[0] if shape else 1}")


def _read(stretch: Stretch, begin: int, count: int) -> Tensor:
    place = stretch.place
    if place.shape:
        return place.rows(stretch.file, begin, count)
    return replace(place, shape=[1]).rows(stretch.file, 0, 1).view(())  # a single number


def _files(folder: Path, kind: str) -> list[Path]:
    """The file of a single rank, or those of several, of which none is missing."""
    single = folder / f"{kind}.safetensors"
    if single.is_file():
        return [single]
    files = sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no weights: there is no {single.name}")
    size = re.fullmatch(rf"{kind}-\d+-of-(\d+)\.safetensors", files[0].name)
    expected = [f"{kind}-{rank + 1:05d}-of-{int(size[1]) if size else 0:05d}.safetensors" for rank in range(len(files))]
    if not size or int(size[1]) != len(files) or [file.name for file in files] != expected:
        raise CheckpointError(
            f"{folder} does not have the part of every rank: {', '.join(file.name for file in files)}"
        )
    return files


def _stretches(file: Path) -> dict[str, Stretch]:
    with file.open("rb") as opened:
        header, places = tensorfile.read_header(opened)
    begins = json.loads(json.loads(header).get("__metadata__", {}).get(BEGINS, "{}"))
    return {name: Stretch(int(begins.get(name, 0)), file, place) for name, place in places.items()}
