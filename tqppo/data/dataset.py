"""Datasets before tokenization: procedural tasks, reasoning-gym, files, the hub, and several of them together.

A dataset is a sequence of rows that can be read in any order; `prompts` renders and samples them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tqppo.data import files, tasks
from tqppo.data.files import digest
from tqppo.data.layout import Dataset, Keys, Message, Row
from tqppo.errors import DataError, PreflightError, UsageError
from tqppo.tables import FileRow

__all__ = ["Dataset", "Keys", "Message", "Row", "digest", "in_turns", "load"]


def load(
    sources: str | Sequence[str],
    *,
    seed: int = 0,
    held_out: bool = False,
    size: int = 10_000,
    task_args: Mapping[str, object] | None = None,
    keys: Keys | None = None,
) -> Dataset:
    """Open tasks, gyms, files, patterns and hub names, one after the other. Files have no held-out part."""
    parts: list[Dataset] = []
    for source in [sources] if isinstance(sources, str) else sources:
        kind, _, name = source.partition(":")
        if kind == "task":
            parts.append(TaskRows(tasks.load(name, task_args), size, seed, held_out))
        elif kind == "gym":
            parts.append(GymRows(name, size, seed=seed, held_out=held_out, arguments=task_args or {}))
        else:
            opened = files.open_source(source, keys or Keys(), held_out=held_out)
            parts.append(opened[0] if len(opened) == 1 else Joined(opened))
    if not parts:
        raise UsageError("data.train is empty: name a task (task:sort), a file (train.jsonl) or several")
    return parts[0] if len(parts) == 1 else Joined(parts)


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
                extra: FileRow = {
                    "reward": "gym",
                    "gym": self._name,
                    "entry": files.plain(dict(entry), self.where(index)),
                }
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
