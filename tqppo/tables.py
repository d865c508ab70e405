"""Data files as rows of columns: what a path or a pattern stands for, and every row with its place for messages.

The config's checks and the datasets both find and read files through here. Imports no torch.
"""

from __future__ import annotations

import csv
import glob
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tqppo.builtin import DATA_FILES
from tqppo.errors import DataError
from tqppo.untrusted import parse_json

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character beyond the first 65536, as JSON writes it
FileRow = dict[str, object]  # one row as the file has it; JSON values
Placed = tuple[str, FileRow]  # a row and its place, such as `train.jsonl:12`


def expand(source: str) -> list[Path]:
    """The files that a path or a pattern (`data/*.jsonl`) stands for, in the order of their names; perhaps none."""
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path) or not is_pattern(source):
        return [path] if os.path.isfile(path) else []
    return [Path(each) for each in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(each)]


def is_pattern(source: str) -> bool:
    return any(char in source for char in "*?[")


def read(path: Path) -> list[Placed]:
    """Every row of a JSONL, JSON or CSV file. Raises DataError at the first place that is broken."""
    data = path.read_bytes()
    if path.suffix in (".jsonl", ".ndjson"):
        return list(_jsonl(path, data))
    if path.suffix == ".json":
        return list(_json(path, data))
    if path.suffix == ".csv":
        return list(_csv(path, data))
    raise DataError(f"data file {path}: expected {', '.join(DATA_FILES[:-1])} or {DATA_FILES[-1]}")


def _jsonl(path: Path, data: bytes) -> Iterator[Placed]:
    has_halves = SURROGATE.search(data) is not None
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _columns(_parsed(line, where), where, may_hold_halves=has_halves)


def _json(path: Path, data: bytes) -> Iterator[Placed]:
    """One list of rows. A file that has them under a name, such as `{"data": [...]}`, is read as well."""
    value, has_halves = _parsed(data, str(path)) if data.strip() else [], SURROGATE.search(data) is not None
    if isinstance(value, Mapping):
        lists = [each for each in value.values() if isinstance(each, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a JSON list of rows, found {_brief(value)}; one row per line is .jsonl")
    for number, row in enumerate(value):
        where = f"{path}[{number}]"
        yield where, _columns(row, where, may_hold_halves=has_halves)


def _csv(path: Path, data: bytes) -> Iterator[Placed]:
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                names = ", ".join(reader.fieldnames or ())
                raise DataError(f"{where}: the row has more or fewer cells than the header, which names {names}")
            yield where, dict(row)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parsed(text: bytes, where: str) -> object:
    try:
        value = parse_json(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the row); save the file as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    return value


def _lone_surrogate(value: object, place: str = "the row") -> str | None:
    """Where a text that cannot be encoded is, in words; None if there is none."""
    if isinstance(value, str):
        return place if any("\ud800" <= char <= "\udfff" for char in value) else None
    entries: list[tuple[str, object]] = []
    if isinstance(value, dict):
        entries = [(f"column {key!a}" if place == "the row" else place, each) for key, each in value.items()]
        entries += [("the name of a column", key) for key in value]
    elif isinstance(value, list):
        entries = [(place, each) for each in value]
    return next((found for name, each in entries if (found := _lone_surrogate(each, name)) is not None), None)


def _columns(value: object, where: str, *, may_hold_halves: bool) -> FileRow:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object with columns, found {_brief(value)}")
    if may_hold_halves and (column := _lone_surrogate(value)) is not None:
        raise DataError(f"{where}: {column} holds half of a character (a lone surrogate such as \\ud800)")
    return value


def _brief(value: object) -> str:
    return f"{value!r:.60}"
