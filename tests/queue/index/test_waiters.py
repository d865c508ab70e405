"""Calls that wait for rows."""

from __future__ import annotations

from collections.abc import Sequence

from tqppo.queue.index.answers import Listing
from tqppo.queue.index.waiters import Waiter, Waiters
from tqppo.queue.meta import TagDict


def waiting(tags: dict[str, TagDict], at_least: int) -> tuple[Waiters, Waiter]:
    def answer(partition: str, keys: Sequence[str]) -> Listing:
        return [*keys], [tags[key] for key in keys], (), 0

    waiters = Waiters(lambda partition, key: tags.get(key), answer)
    waiter = Waiter("train", ["a", "b"], {"status": ["done"]}, at_least)
    waiters.add(waiter)
    return waiters, waiter


def test_a_waiter_is_answered_once_enough_rows_match() -> None:
    tags: dict[str, TagDict] = {"a": {"status": "done"}}
    waiters, waiter = waiting(tags, at_least=2)
    assert not waiter.future.done()
    tags["b"] = {"status": "done"}
    waiters.changed("val", ["b"])
    assert not waiter.future.done()
    waiters.changed("train", ["b"])
    assert waiter.future.result(0)[0] == ["a", "b"]
    assert not waiters.drop(waiter)


def test_a_message_names_the_rows_that_are_missing() -> None:
    waiters, waiter = waiting({"a": {"status": "running"}}, at_least=1)
    assert "a (status='running')" in waiters.missing(waiter)
    assert "b (no such row yet)" in waiters.missing(waiter)
    assert waiters.drop(waiter)
