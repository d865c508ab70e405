"""What the index answers to its callers. These values travel: by socket as JSON, or through Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from tqppo.queue.meta import TagDict
from tqppo.queue.storage import Locator

Listing = tuple[list[str], list[TagDict], tuple[str, ...], int]  # keys, tags, columns of all rows, version


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to `locate`: blocks, and per group of columns the cells (index into `blocks`, row in it)."""

    blocks: list[tuple[int, Locator]]
    groups: list[tuple[list[str], np.ndarray, np.ndarray]]


class Published(TypedDict):
    """The answer to `publish`."""

    tags: list[TagDict] | None  # None: those that the caller gave
    version: int
    spare: int  # bytes left on the node


class PartitionStats(TypedDict):
    rows: int
    columns: list[str]
    bytes: int
    blocks: int


class NodeStats(TypedDict):
    bytes: int
    budget: int
    waiting: int  # puts


class Stats(TypedDict):
    rows: int
    bytes: int
    blocks: int
    partitions: dict[str, PartitionStats]
    nodes: dict[str, NodeStats]


class TableDump(TypedDict):
    """One partition in a snapshot. A column is two lists: the block of each row (-1: no value), and the row in it."""

    keys: list[str]
    tags: list[TagDict]
    columns: dict[str, Sequence[Sequence[int] | np.ndarray]]


class Dump(TypedDict):
    tables: dict[str, TableDump]
    blocks: dict[int, Locator]
    pin: int
