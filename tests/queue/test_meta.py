"""Batches of names: whole splits, strict joins, canonical order, small when sent."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from tqppo.errors import QueueError
from tqppo.queue.meta import BatchMeta, plain_tags


def batch(count: int, partition: str = "train") -> BatchMeta:
    tags = tuple({"order": count - i, "session": i % 3, "trajectory": 0} for i in range(count))
    return BatchMeta(partition, tuple(f"u{i}_{i % 3}_0" for i in range(count)), tags, ("tokens",))


@pytest.mark.parametrize("count", range(0, 17))
def test_a_split_has_every_key_exactly_once(count: int) -> None:
    whole = batch(count)
    parts = whole.split(8)
    assert len(parts) == 8
    assert sum(len(part) for part in parts) == count
    assert BatchMeta.join(parts) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_take_and_select_keep_tags_with_their_keys() -> None:
    whole = batch(5)
    chosen = whole.select(["u3_0_0", "u1_1_0"])
    assert chosen == whole.take([3, 1])
    assert [tag["order"] for tag in chosen.tags] == [2, 4]
    with pytest.raises(QueueError, match="unknown"):
        whole.select(["u1_1_0", "unknown"])


def test_joins_with_conflicts_are_errors() -> None:
    with pytest.raises(QueueError, match="partitions 'train' and 'val'"):
        BatchMeta.join([batch(2), batch(2, "val")])
    with pytest.raises(QueueError, match="values"):
        BatchMeta.join([batch(2).take([0]), batch(2).take([1]).with_columns("values")])
    with pytest.raises(QueueError, match=r"twice.*u0_0_0"):
        BatchMeta.join([batch(2), batch(1)])
    with pytest.raises(QueueError, match="nothing to join"):
        BatchMeta.join([])


def test_canonical_order_is_prompt_then_session_then_trajectory() -> None:
    tags = ({"order": 1, "session": 0, "trajectory": 1}, {"order": 0, "session": 2, "trajectory": 0},
            {"order": 1, "session": 0, "trajectory": 0}, {"order": 0, "session": 1, "trajectory": 0})  # fmt: skip
    assert BatchMeta("train", ("a", "b", "c", "d"), tags).in_order().keys == ("d", "b", "c", "a")


def test_keys_are_unique_and_tags_match_them() -> None:
    with pytest.raises(QueueError, match="twice"):
        BatchMeta("train", ("a", "b", "a"))
    with pytest.raises(QueueError, match="2 keys was given 1 tags"):
        BatchMeta("train", ("a", "b"), ({},))


def test_columns_are_added_once() -> None:
    assert batch(1).with_columns("values", "tokens").columns == ("tokens", "values")


def test_a_batch_is_small_when_sent() -> None:
    assert len(pickle.dumps(batch(1024))) < 64 * 1024


class Mixed(str):
    """Not what JSON returns."""


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ({"a": 1, "b": "x", "c": None, "d": True, "e": 0.1}, {"a": 1, "b": "x", "c": None, "d": True, "e": 0.1}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ({"a": np.float32(0.5)}, {"a": 0.5}),
        ({"a": {"b": np.int64(3)}}, {"a": {"b": 3}}),
        ({1: "x"}, {"1": "x"}),
        ({"a": Mixed("x")}, {"a": "x"}),
    ],
)
def test_tags_are_what_json_returns(tag: dict[Any, Any], expected: dict[str, Any]) -> None:
    (found,) = plain_tags(["k"], [tag])
    assert found == expected
    assert list(map(type, found.values())) == list(map(type, expected.values()))
    assert found is not tag


@pytest.mark.parametrize("tag", [{"a": object()}, {"\0a": 1}, {"a": {"\0b": 1}}])
def test_tags_that_json_cannot_hold_name_their_row(tag: dict[str, Any]) -> None:
    with pytest.raises(QueueError, match="the tags of row 'k' are not JSON"):
        plain_tags(["j", "k"], [{"a": 1}, tag])
