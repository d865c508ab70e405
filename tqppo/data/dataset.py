"""Datasets before tokenization: procedural tasks, reasoning-gym, JSONL and parquet files.

A dataset is a sequence of rows that can be read in any order; `prompts` renders and samples them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeGuard

from tqppo.builtin import DATA_FILES
from tqppo.data import tasks
from tqppo.errors import DataError, PreflightError, UsageError

DEFAULT_SOURCE_KEY = "data_source"
Message = dict[str, object]  # of a chat: role, content, …
FileRow = dict[str, object]  # one row as the file has it; JSON values


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `prompt` is plain text or a list of chat messages; `answer` and `extra` are JSON values."""

    prompt: str | list[Message]
    answer: object
    source: str
    extra: dict[str, object] = field(default_factory=dict)
    shown: tuple[list[Message], str] | None = None  # what a warm start learns instead of the answer


class Dataset(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row: ...
    def where(self, index: int) -> str:
        """The row's name in messages, such as `train.jsonl:12`."""

    def fingerprint(self) -> str:
        """A digest that changes when the rows or their order change."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the columns; a dot leads into a nested column. An empty `answer` means that rows have none."""

    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"
    source: str = DEFAULT_SOURCE_KEY


def load(
    sources: str | Sequence[str],
    *,
    seed: int = 0,
    held_out: bool = False,
    size: int = 10_000,
    task_args: Mapping[str, object] | None = None,
    keys: Keys | None = None,
) -> Dataset:
    """Open `task:NAME`, `gym:NAME` or files, one after the other. `held_out` applies to tasks and gyms only."""
    keys = keys or Keys()
    parts: list[Dataset] = []
    for source in [sources] if isinstance(sources, str) else sources:
        kind, _, name = source.partition(":")
        if kind == "task":
            parts.append(TaskRows(tasks.load(name, task_args), size, seed, held_out))
        elif kind == "gym":
            parts.append(GymRows(name, size, seed=seed, held_out=held_out, arguments=task_args or {}))
        else:
            parts.append(read_file(Path(source).expanduser(), keys))
    if not parts:
        raise UsageError("data.train is empty: name a task (task:sort), a file (train.jsonl) or several")
    return parts[0] if len(parts) == 1 else Joined(parts)


def is_procedural(source: str) -> bool:
    """Whether a source generates its rows, so that it has a held-out part."""
    return source.partition(":")[0] in ("task", "gym")


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The problems of a task, each generated when it is read: a million of them cost nothing before."""

    task: tasks.Task
    size: int
    seed: int
    held_out: bool

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> Row:
        problem = self.task.problem(index, seed=self.seed, held_out=self.held_out)
        return Row(problem.text, problem.answer, self.task.name, {"reward": self.task.reward}, problem.shown)

    def where(self, index: int) -> str:
        return f"task:{self.task.name}[{index}]"

    def fingerprint(self) -> str:
        return digest([self.task.name, self.task.arguments, self.task.reward, self.size, self.seed, self.held_out])


class GymRows:
    """A reasoning-gym dataset; a row's `extra` carries the entry that the dataset's own scorer needs."""

    def __init__(self, name: str, size: int, *, seed: int, held_out: bool, arguments: Mapping[str, object]) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise PreflightError(f"gym:{name} needs reasoning-gym: pip install 'tqppo[gym]'") from None
        if name not in reasoning_gym.factory.DATASETS:
            raise UsageError(f"reasoning-gym has no dataset {name!r}; see reasoning_gym.factory.DATASETS")
        self._identity = ["gym", name, sorted(arguments.items()), size, seed, held_out]
        self._name, self._size, self._held_out = name, size, held_out
        try:
            # Several draws per row, because a draw may belong to the other part of the split.
            self._rows = reasoning_gym.create_dataset(name, size=size * tasks.MAX_DRAWS, seed=seed, **arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise UsageError(f"gym:{name} refuses task_args {dict(arguments)}: {error}") from error

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        for draw in range(tasks.MAX_DRAWS):
            entry = self._rows[index + draw * self._size]
            if tasks.is_held_out(f"{self._name}/{entry['question']}") == self._held_out:
                extra: FileRow = {"reward": "gym", "gym": self._name, "entry": _json(dict(entry))}
                return Row(entry["question"], str(entry["answer"]), self._name, extra)
        raise DataError(f"{self.where(index)}: no problem found for this part; give the task a larger range")

    def where(self, index: int) -> str:
        return f"gym:{self._name}[{index}]"

    def fingerprint(self) -> str:
        return digest(self._identity)


class Joined:
    """Several datasets, one after the other."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def spans(self) -> list[range]:
        """The indexes of each dataset's rows."""
        return [range(end - len(part), end) for part, end in zip(self._parts, self._ends, strict=True)]

    def _find(self, index: int) -> tuple[Dataset, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)

    def row(self, index: int) -> Row:
        part, inner = self._find(index)
        return part.row(inner)

    def where(self, index: int) -> str:
        part, inner = self._find(index)
        return part.where(inner)

    def fingerprint(self) -> str:
        return digest([part.fingerprint() for part in self._parts])


def in_turns(rows: Dataset) -> Iterator[int]:
    """Every index once: of joined datasets the first row of each, then the second of each, and so on."""
    if not isinstance(rows, Joined):
        yield from range(len(rows))
        return
    spans = rows.spans()
    for place in range(max(len(span) for span in spans)):
        yield from (span[place] for span in spans if place < len(span))


def read_file(path: Path, keys: Keys) -> Dataset:
    if not path.is_file():
        hint = " (a procedural task is written task:NAME)" if str(path) in tasks.TASKS else ""
        raise DataError(f"data file {path} does not exist{hint}")
    if path.suffix == ".parquet":
        return ParquetRows(path, keys)
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonRows(path, keys)
    raise DataError(f"data file {path}: expected {', '.join(DATA_FILES[:-1])} or {DATA_FILES[-1]}")


class JsonRows:
    """A JSONL file, parsed as a whole so that a broken line is found before training starts."""

    def __init__(self, path: Path, keys: Keys) -> None:
        self._path, self._keys = path, keys
        data = path.read_bytes()
        self._fingerprint = digest([hashlib.sha256(data).hexdigest(), keys.prompt, keys.answer, keys.source])
        self._lines: list[int] = []
        self._columns: list[FileRow] = []
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                self._lines.append(number)
                self._columns.append(parse_row(line, f"{path}:{number}"))
        if not self._lines:
            raise DataError(f"data file {path} has no rows")
        for index in range(len(self._lines)):
            self.row(index)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Row:
        return to_row(self._columns[index], self._keys, where=self.where(index), stem=self._path.stem)

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def fingerprint(self) -> str:
        return self._fingerprint


class ParquetRows:
    """A parquet file, memory-mapped where possible. The first row is checked at once, the others when they are read."""

    def __init__(self, path: Path, keys: Keys) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path, self._keys = path, keys
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(f"data file {path} is not a parquet file: {error}") from error
        if not len(self._table):
            raise DataError(f"data file {path} has no rows")
        self.row(0)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        columns = _json(self._table.slice(index, 1).to_pylist()[0])
        return to_row(columns, self._keys, where=self.where(index), stem=self._path.stem)

    def where(self, index: int) -> str:
        return f"{self._path}:row {index + 1}"

    def fingerprint(self) -> str:
        with self._path.open("rb") as file:
            content = hashlib.sha256()
            while chunk := file.read(1 << 20):
                content.update(chunk)
        return digest([content.hexdigest(), self._keys.prompt, self._keys.answer, self._keys.source])


def to_row(columns: FileRow, keys: Keys, *, where: str, stem: str) -> Row:
    """Read a row in verl's layout (nested answer, `extra_info`) or TRL's (any further columns)."""
    prompt = _lookup(columns, keys.prompt, where, "data.prompt_key")
    if not _is_prompt(prompt):
        raise DataError(
            f"{where}: column {keys.prompt!r} should be text or a list of chat messages, not {prompt!r:.80}"
        )
    answer = _lookup(columns, keys.answer, where, "data.answer_key") if keys.answer else None
    if keys.source == DEFAULT_SOURCE_KEY and keys.source not in columns:
        source = stem  # TRL's files have no such column, so the file's name is the source
    else:
        source = str(_lookup(columns, keys.source, where, "data.source_key"))
    used = {key.split(".")[0] for key in (keys.prompt, keys.answer, keys.source)} | {"reward_model", "extra_info"}
    extra = {name: value for name, value in columns.items() if name not in used}
    further = columns.get("extra_info") or {}
    if not isinstance(further, dict):
        raise DataError(f"{where}: column 'extra_info' should be an object, not {further!r:.80}")
    return Row(prompt, answer, source, extra | further)


def _is_prompt(value: object) -> TypeGuard[str | list[Message]]:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and "role" in each and "content" in each for each in value)
    )


def _lookup(columns: FileRow, key: str, where: str, setting: str) -> object:
    value: object = columns
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = ", ".join(columns) or "none"
            raise DataError(f"{where}: no column {key!r}; columns here: {has}. Set {setting} to the one to use")
        value = value[part]
    return value


def parse_row(line: bytes, where: str) -> FileRow:
    """One line of a JSONL file; `where` names it in messages."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object with columns, found {value!r:.60}")
    return value


def _json(columns: FileRow) -> FileRow:
    """The columns after a round trip through JSON: tuples become lists, dates and decimals become text."""
    plain: FileRow = json.loads(json.dumps(columns, default=str))
    return plain


def digest(value: object) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
