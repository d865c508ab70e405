"""Scores on disk, so that a resumed run and repeated rows do not ask a teacher twice. Imports no torch.

One SQLite file per teacher, shared by its replicas. It is only a cache: entries that cannot be read are computed again,
a damaged file is replaced by an empty one, and a full disk or a locked file turns the cache off for that call.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

log = logging.getLogger(__name__)

BUSY_S = 10.0  # how long a replica waits for another one's write
FREED_SHARE = 0.9  # what is left of the limit after old entries were removed, so that not every put removes some

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]


def request_key(teacher: str, kind: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> bytes:
    """The name of a request: which teacher (its fingerprint), what it is asked for, and of which tokens."""
    digest = blake2b(f"{teacher}/{kind}/{len(sequences)}".encode(), digest_size=24)
    for tokens, start in zip(sequences, starts, strict=True):
        digest.update(np.array([len(tokens), start, *tokens], dtype=np.int64).tobytes())
    return digest.digest()


class ScoreCache:
    """Arrays by key. `max_bytes` bounds their sum, and the oldest go first; 0 turns the cache off."""

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self._database: sqlite3.Connection | None = None
        self._num_bytes = 0

    def open(self) -> None:
        if self.max_bytes <= 0:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connect()
        except (OSError, sqlite3.OperationalError) as error:
            self._do_without(error)
        except sqlite3.DatabaseError as error:
            self._remake(error)

    def get(self, key: bytes) -> dict[str, np.ndarray] | None:
        found = self._safely(
            lambda base: base.execute("SELECT digest, value FROM scores WHERE key = ?", (key,)).fetchone()
        )
        if found is None:
            return None
        digest, value = found
        if blake2b(value, digest_size=16).digest() != digest:
            log.warning("%s: an entry is damaged; it is computed again", self.path)
            self._safely(lambda base: base.execute("DELETE FROM scores WHERE key = ?", (key,)))
            return None
        return decoded(value)

    def put(self, key: bytes, arrays: Arrays) -> None:
        value = encoded(arrays)
        digest = blake2b(value, digest_size=16).digest()
        insert = "INSERT OR REPLACE INTO scores VALUES (?, ?, ?)"
        if self._safely(lambda base: base.execute(insert, (key, digest, value))) is None:
            return
        self._num_bytes += len(value)
        if self._num_bytes > self.max_bytes:
            self._safely(self._remove_oldest)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _connect(self) -> None:
        base = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        self._database = base
        base.execute("PRAGMA auto_vacuum = FULL")  # the file shrinks when entries are removed
        base.execute("PRAGMA synchronous = OFF")  # a kill loses nothing; a power cut may, and then the cache is remade
        base.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, digest BLOB, value BLOB)")
        self._num_bytes = _sum_of_bytes(base)

    def _remake(self, error: sqlite3.DatabaseError) -> None:
        log.warning("%s is damaged (%s); starting with an empty cache", self.path, error)
        self.close()
        for path in (self.path, self.path.with_name(f"{self.path.name}-journal")):
            path.unlink(missing_ok=True)
        try:
            self._connect()
        except sqlite3.Error as again:
            self._do_without(again)

    def _do_without(self, error: OSError | sqlite3.Error) -> None:
        log.warning("%s cannot be used, so scores are not kept: %s", self.path, error)
        self.close()

    def _safely(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """The result of `work`, or None if there is no cache or the file cannot be used right now."""
        if self._database is None:
            return None
        try:
            return work(self._database)
        except sqlite3.OperationalError as error:  # locked for too long, or no space
            log.warning("%s: %s", self.path, error)
        except sqlite3.DatabaseError as error:
            self._remake(error)
        return None

    def _remove_oldest(self, base: sqlite3.Connection) -> None:
        excess = _sum_of_bytes(base) - int(FREED_SHARE * self.max_bytes)
        sizes = base.execute("SELECT rowid, LENGTH(value) FROM scores ORDER BY rowid")
        last = 0
        for rowid, size in sizes:
            if excess <= 0:
                break
            last, excess = rowid, excess - size
        sizes.close()
        base.execute("DELETE FROM scores WHERE rowid <= ?", (last,))
        self._num_bytes = _sum_of_bytes(base)


def _sum_of_bytes(base: sqlite3.Connection) -> int:
    return int(base.execute("SELECT COALESCE(SUM(LENGTH(value)), 0) FROM scores").fetchone()[0])


def encoded(arrays: Arrays) -> bytes:
    """Arrays as bytes: a line of JSON that describes them, then their contents."""
    header = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    contents = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    return b"\n".join([json.dumps(header).encode(), b"".join(contents)])


def decoded(value: bytes) -> dict[str, np.ndarray]:
    header, _, contents = value.partition(b"\n")
    found: dict[str, np.ndarray] = {}
    position = 0
    for name, (dtype, shape) in json.loads(header).items():
        count = int(np.prod(shape, dtype=np.int64))
        found[name] = np.frombuffer(contents, dtype, count, position).reshape(shape)
        position += found[name].nbytes
    return found
