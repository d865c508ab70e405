"""Looks through data files for the columns that a config names, before anything starts. Imports no torch.

Of parquet files only the column is read. Files are read up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tqppo import tables
from tqppo.errors import DataError
from tqppo.untrusted import parse_json

MAX_SCANNED_BYTES = 64 * 1024 * 1024  # of each JSONL file: about a second
MAX_SCANNED_ROWS = 2_000_000  # of each parquet file
SHOWN_PLACES = 3


@dataclass
class Values:
    """The values of a column, and where rows lack it. `is_whole` is false if a file was too large to read on."""

    values: dict[str, str] = field(default_factory=dict)  # value → the first row that has it
    missing: list[str] = field(default_factory=list)  # the first rows without a value, such as train.jsonl:12
    num_missing: int = 0
    is_whole: bool = True

    def add(self, value: object, where: str) -> None:
        if value is None or value == "":
            self.num_missing += 1
            if len(self.missing) < SHOWN_PLACES:
                self.missing.append(where)
        else:
            self.values.setdefault(str(value), where)

    def merge(self, other: Values) -> None:
        self.values = {**other.values, **self.values}
        self.missing = [*self.missing, *other.missing][:SHOWN_PLACES]
        self.num_missing += other.num_missing
        self.is_whole &= other.is_whole


def source_values(path: Path, column: str, default: str) -> Values | None:
    """The sources of a file's rows. `default` is the source of rows that have no such column at all."""
    return _scan(path, column, lambda row: default if default and column not in row else _look_up(row, column))


def column_values(path: Path, column: str) -> Values | None:
    """The values of a further column, as a run finds it: inside extra_info first, then among the row's columns."""
    return _scan(path, column, lambda row: value_in(row, column))


def value_in(row: Mapping[str, object], column: str) -> object:
    """The value of a further column of one row; None if there is none."""
    inner = row.get("extra_info")
    found = _look_up(inner, column) if isinstance(inner, Mapping) else None
    return _look_up(row, column) if found is None else found


def _look_up(table: Mapping[str, object], column: str) -> object:
    """A column of a table; a dot goes into a nested one."""
    value: object = table
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _scan(path: Path, column: str, value_of: Callable[[Mapping[str, object]], object]) -> Values | None:
    """Looks at every row within the limits. None if the file cannot be read: loading the dataset reports why."""
    if not path.is_file():
        return None
    found = Values()
    try:
        for where, row in _rows(path, column, found):
            found.add(value_of(row), where)
    except (OSError, ValueError, DataError):
        return None
    return found


def _rows(path: Path, column: str, found: Values) -> Iterator[tuple[str, Mapping[str, object]]]:
    if path.suffix == ".parquet":
        import pyarrow

        try:
            yield from _parquet(path, column, found)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a parquet file: {error}") from error
    elif path.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(path, found)
    elif path.stat().st_size > MAX_SCANNED_BYTES:
        found.is_whole = False
    else:
        yield from tables.read(path)


def _jsonl(path: Path, found: Values) -> Iterator[tuple[str, Mapping[str, object]]]:
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            size += len(line)
            if size > MAX_SCANNED_BYTES:
                found.is_whole = False
                return
            row = _parsed(line)
            if row is not None:
                yield f"{path}:{number}", row


def _parsed(line: bytes) -> Mapping[str, object] | None:
    """The row; None for empty and broken lines, which loading the dataset reports with their numbers."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _parquet(path: Path, column: str, found: Values) -> Iterator[tuple[str, Mapping[str, object]]]:
    import pyarrow.parquet as parquet

    number = 0
    with parquet.ParquetFile(path) as file:
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]
        names = (column, f"extra_info.{column}")
        wanted = [name for name in names if any(leaf == name or leaf.startswith(f"{name}.") for leaf in leaves)]
        for batch in file.iter_batches(columns=wanted):
            for row in batch.to_pylist() if wanted else [{}] * batch.num_rows:
                number += 1
                yield f"{path}:row {number}", row
            if number >= MAX_SCANNED_ROWS:
                found.is_whole = number == file.metadata.num_rows
                return
