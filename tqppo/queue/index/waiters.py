"""Calls that wait at the index for rows, and which of their rows match. A change looks only at the changed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tqppo.queue.index.answers import Listing
from tqppo.queue.index.table import matches
from tqppo.queue.meta import Tags, shorten

TagsOf = Callable[[str, str], Tags | None]  # (partition, key) → tags; None: there is no such row


@dataclass(eq=False, slots=True)
class Waiter:
    partition: str
    keys: Sequence[str]
    where: Tags
    at_least: int
    future: Future[Listing] = field(default_factory=Future)
    done: set[str] = field(default_factory=set)
    wanted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.wanted = frozenset(self.keys)
        self.future.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it


class Waiters:
    """Callers must hold the index lock. `answer` lists the rows of a waiter that match, by partition and keys."""

    def __init__(self, tags_of: TagsOf, answer: Callable[[str, Sequence[str]], Listing]) -> None:
        self._tags_of, self._answer = tags_of, answer
        self._waiting: dict[str, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        self._waiting.setdefault(waiter.partition, []).append(waiter)
        self._update(waiter, waiter.keys)

    def drop(self, waiter: Waiter) -> bool:
        """End a wait; False if it is answered already."""
        waiting = self._waiting.get(waiter.partition, [])
        if waiter not in waiting:
            return False
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[waiter.partition]
        return True

    def changed(self, partition: str, keys: Sequence[str]) -> None:
        for waiter in list(self._waiting.get(partition, ())):
            self._update(waiter, keys)

    def all_changed(self) -> None:
        for waiter in [waiter for waiting in self._waiting.values() for waiter in waiting]:
            self._update(waiter, waiter.keys)

    def _update(self, waiter: Waiter, keys: Iterable[str]) -> None:
        for key in waiter.wanted.intersection(keys):
            if self._matches(waiter, key):
                waiter.done.add(key)
            else:
                waiter.done.discard(key)
        if len(waiter.done) >= waiter.at_least and self.drop(waiter):
            waiter.future.set_result(self._answer(waiter.partition, [key for key in waiter.keys if key in waiter.done]))

    def _matches(self, waiter: Waiter, key: str) -> bool:
        tags = self._tags_of(waiter.partition, key)
        return tags is not None and matches(tags, waiter.where)

    def missing(self, waiter: Waiter) -> str:
        """Which rows a waiter lacks, for a message."""
        late = []
        for key in waiter.keys:
            tags = self._tags_of(waiter.partition, key)
            if tags is None:
                late.append(f"{key} (no such row yet)")
            elif not matches(tags, waiter.where):
                late.append(f"{key} ({', '.join(f'{name}={tags.get(name)!r}' for name in waiter.where)})")
        wanted = ", ".join(f"{name} in {value!r}" for name, value in waiter.where.items())
        return (
            f"{len(waiter.keys) - len(late)} of {len(waiter.keys)} rows of partition {waiter.partition!r} have "
            f"{wanted or 'appeared'} ({waiter.at_least} wanted); still missing: {shorten(late)}"
        )
