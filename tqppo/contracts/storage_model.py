"""A hypothesis state machine that runs the same operations on a queue and on a plain dictionary, and compares them."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tqppo.columns import Column, Kind, declare
from tqppo.queue.client import BatchMeta, Queue
from tqppo.queue.meta import ColumnData, Json, TagDict

declare(Column("model_row", Kind.ROW, "float32"))
declare(Column("model_ragged", Kind.RAGGED, "int64"))
declare(Column("model_pairs", Kind.RAGGED, "int16", trailing=(2,)))
declare(Column("model_json", Kind.JSON))

COLUMNS = ("model_row", "model_ragged", "model_pairs", "model_json")
KEYS = tuple(f"k{i}" for i in range(12))

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
some_columns = st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True)
some_tags = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=2)
_folders = itertools.count()


def value(column: str, seed: int) -> Json:
    """A plain value for a cell. Some ragged values are empty, others large enough for compaction."""
    length = (0, 1, 3, 40, 40_000)[seed % 5] if column != "model_row" else 0
    return {
        "model_row": float(seed),
        "model_ragged": [seed + i for i in range(length)],
        "model_pairs": [[i % 7, seed % 11] for i in range(length % 1000)],
        "model_json": {"seed": seed, "text": "é" * (length % 100)},
    }[column]


def put_form(column: str, values: list[Json]) -> ColumnData:
    """Values in the form in which the queue takes them."""
    if column == "model_pairs":
        return [torch.tensor(rows, dtype=torch.int16).view(-1, 2) for rows in values]
    return values


def plain(column: ColumnData) -> list[Json]:
    if isinstance(column, list):
        return column
    return [row.tolist() for row in column.unbind()]


class QueueMachine(RuleBasedStateMachine):
    def __init__(self, queue: Queue, folder: Path) -> None:
        super().__init__()
        self.queue, self.folder = queue, folder
        self.rows: dict[str, dict[str, Json]] = {}
        self.tags: dict[str, TagDict] = {}
        self.saved: tuple[Path, dict[str, dict[str, Json]], dict[str, TagDict]] | None = None
        self.queue.clear(self.queue.list())

    @rule(keys=some_keys, columns=some_columns, seed=st.integers(0, 999), tags=some_tags)
    def put(self, keys: list[str], columns: list[str], seed: int, tags: dict[str, int]) -> None:
        """Put new rows and known ones together, which adds and replaces columns."""
        data = {name: [value(name, seed + i) for i in range(len(keys))] for name in columns}
        given = {name: put_form(name, values) for name, values in data.items()}
        batch = self.queue.put(keys, given, tags=[tags] * len(keys))
        for i, key in enumerate(keys):
            self.rows.setdefault(key, {}).update({name: data[name][i] for name in columns})
            self.tags.setdefault(key, {}).update(tags)
        assert list(batch.tags) == [self.tags[key] for key in keys]

    @rule(keys=some_keys, tags=some_tags)
    def tag(self, keys: list[str], tags: dict[str, int]) -> None:
        self.queue.tag(dict.fromkeys(keys, tags))
        for key in keys:
            self.rows.setdefault(key, {})
            self.tags.setdefault(key, {}).update(tags)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        column = data.draw(st.sampled_from(COLUMNS))
        having = [key for key, row in self.rows.items() if column in row]
        if not having:
            return
        keys = data.draw(st.lists(st.sampled_from(having), min_size=1, unique=True))
        others = [name for name in COLUMNS if all(name in self.rows[key] for key in keys)]
        found = self.queue.get(BatchMeta("train", tuple(keys)), others)
        for name in others:
            assert plain(found[name]) == [self.rows[key][name] for key in keys], name

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(list(self.rows)), min_size=1, unique=True))
        self.queue.clear(BatchMeta("train", tuple(keys)))
        for key in keys:
            del self.rows[key], self.tags[key]

    @rule()
    def snapshot(self) -> None:
        folder = self.folder / f"snapshot{next(_folders)}"
        self.queue.snapshot(folder)
        self.saved = folder, {k: dict(row) for k, row in self.rows.items()}, {k: dict(t) for k, t in self.tags.items()}

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self) -> None:
        assert self.saved is not None
        folder, rows, tags = self.saved
        self.queue.restore(folder)
        self.rows, self.tags = {k: dict(row) for k, row in rows.items()}, {k: dict(t) for k, t in tags.items()}

    @invariant()
    def lists_the_same(self) -> None:
        batch = self.queue.list()
        assert dict(zip(batch.keys, batch.tags, strict=True)) == self.tags
        assert (self.queue.stats()["bytes"] > 0) == any(self.rows.values())
