"""Datasets that lie in files or on the Hugging Face hub. `dataset` opens them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Protocol

from tqppo import tables
from tqppo.builtin import DATA_FILES
from tqppo.data import tasks
from tqppo.data.layout import Dataset, Keys, Row, to_row
from tqppo.data.recipes import command_for
from tqppo.errors import DataError, PreflightError, UsageError
from tqppo.tables import FileRow

HUB = re.compile(r"hub:(?P<name>[^:@]+)(:(?P<subset>[^:@]+))?(@(?P<split>[^:@]+))?")
SHOWN_NEIGHBOURS = 5


def open_source(source: str, keys: Keys, *, held_out: bool) -> list[Dataset]:
    """The datasets of a path, a pattern or a hub name, one per file."""
    if source.startswith("hub:"):
        return [hub_rows(source, keys, held_out=held_out)]
    found = tables.expand(source)
    if not found:
        raise DataError(missing(source))
    return [read_file(path, keys) for path in found]


def missing(source: str) -> str:
    """What to say of a path or pattern that leads to no file: where it was looked for, and what is there instead."""
    path = Path(os.path.expanduser(source))
    if source in tasks.TASKS:
        return f"data file {path} does not exist (a procedural task is written task:NAME)"
    place = path.absolute()
    if tables.is_pattern(source):
        return f"no file matches {path}; looked for {place}"
    if path.is_dir():
        return f"{path} is a folder; name its files, such as {path / '*.jsonl'}"
    if command := command_for(path):
        return f"data file {path} does not exist; looked for {place}; to make it: {command}"
    if not place.parent.is_dir():
        return f"data file {path} does not exist; looked for {place}, and there is no folder {place.parent}"
    data = (each.name for each in sorted(place.parent.iterdir()) if each.name.endswith(DATA_FILES))
    there = ", ".join(islice(data, SHOWN_NEIGHBOURS)) or "no data files"
    return f"data file {path} does not exist; looked for {place}; in that folder: {there}"


def read_file(path: Path, keys: Keys) -> Dataset:
    return ParquetRows(path, keys) if path.suffix == ".parquet" else TextRows(path, keys)


class TextRows:
    """A JSONL, JSON or CSV file, parsed as a whole so that a broken line is found before training starts."""

    def __init__(self, path: Path, keys: Keys) -> None:
        self._stem = path.stem
        self._rows = tables.read(path)
        if not self._rows:
            raise DataError(f"data file {path} has no rows")
        self._keys = keys.found_in(self._rows[0][1], self.where(0))
        self._fingerprint = digest([hashlib.sha256(path.read_bytes()).hexdigest(), *astuple(self._keys)])
        for index in range(len(self)):
            self.row(index)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        where, columns = self._rows[index]
        return to_row(columns, self._keys, where=where, stem=self._stem)

    def where(self, index: int) -> str:
        return self._rows[index][0]

    def fingerprint(self) -> str:
        return self._fingerprint


class ParquetRows:
    """A parquet file, memory-mapped where possible. The first row is checked at once, the others when they are read."""

    def __init__(self, path: Path, keys: Keys) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"data file {path} is not a parquet file: {error}") from error
        if not len(self._table):
            raise DataError(f"data file {path} has no rows")
        self._keys = keys.found_in(self._columns(0), self.where(0))
        self.row(0)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        return to_row(self._columns(index), self._keys, where=self.where(index), stem=self._path.stem)

    def where(self, index: int) -> str:
        return f"{self._path}:row {index + 1}"

    def fingerprint(self) -> str:
        with self._path.open("rb") as file:
            content = hashlib.sha256()
            while chunk := file.read(1 << 20):
                content.update(chunk)
        return digest([content.hexdigest(), *astuple(self._keys)])

    def _columns(self, index: int) -> FileRow:
        try:
            columns: FileRow = self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: a text column is not UTF-8: {error}") from None
        return plain(columns, self.where(index))


class HubTable(Protocol):
    """The part of `datasets.Dataset` that is used here."""

    _fingerprint: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> FileRow: ...


class HubRows:
    """One split of a dataset of the Hugging Face hub."""

    def __init__(self, name: str, table: HubTable, keys: Keys) -> None:
        self._name, self._table = name, table
        if not len(table):
            raise DataError(f"{name} has no rows")
        self._keys = keys.found_in(self._columns(0), self.where(0))
        self.row(0)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        return to_row(self._columns(index), self._keys, where=self.where(index), stem=_dataset_name(self._name))

    def where(self, index: int) -> str:
        return f"{self._name}[{index}]"

    def fingerprint(self) -> str:
        return digest([self._name, len(self), self._table._fingerprint, *astuple(self._keys)])

    def _columns(self, index: int) -> FileRow:
        return plain(dict(self._table[index]), self.where(index))


def hub_rows(source: str, keys: Keys, *, held_out: bool) -> HubRows:
    """Open `hub:NAME[:SUBSET][@SPLIT]`; without a split, `train` for training and `test` for validation."""
    match = HUB.fullmatch(source)
    if match is None:
        raise UsageError(f'{source} is not a hub name; write "hub:openai/gsm8k:main@train": name, subset, split')
    split = match["split"] or ("test" if held_out else "train")
    return HubRows(source, _load_from_hub(match["name"], match["subset"], split), keys)


def _load_from_hub(name: str, subset: str | None, split: str) -> HubTable:
    try:
        import datasets
    except ImportError:
        raise PreflightError(f"hub:{name} needs the package datasets: pip install 'tqppo[hub]'") from None
    try:
        table: HubTable = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = str(error).strip().split("\n")[0]
        raise PreflightError(f"hub:{name} cannot be loaded (split {split}): {why}{_offline()}") from error
    return table


def _offline() -> str:
    names = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")]
    return f". {names[0]} is set: only datasets in this machine's cache can be used" if names else ""


def _dataset_name(source: str) -> str:
    """The source of rows that name none: the dataset without subset and split."""
    match = HUB.fullmatch(source)
    return match["name"] if match else source


def plain(columns: FileRow, where: str) -> FileRow:
    """The columns after a round trip through JSON: tuples become lists, dates and decimals become text.

    DataError for a column with bytes, which are no text.
    """
    for name, value in columns.items():
        if _holds_bytes(value):
            raise DataError(
                f"{where}: column {name!r} holds bytes, not text; save it as a string column, or leave it out"
            )
    same: FileRow = json.loads(json.dumps(columns, default=str))
    return same


def _holds_bytes(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return any(map(_holds_bytes, value)) if isinstance(value, list) else isinstance(value, bytes | bytearray)


def digest(value: object) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
