"""What the driver passes around instead of tensors: the keys of rows, their tags, the columns they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from tqppo.errors import QueueError

Json = Any  # whatever JSON can hold
Tags = Mapping[str, Json]
TagDict = dict[str, Json]
ColumnData = Any  # what `put` takes and `get` returns for a column: which type it is depends on the column's kind
T = TypeVar("T")
_SIMPLE = frozenset({str, int, float, bool, type(None)})  # types of values that JSON returns as they are
_NAMES = frozenset({str})
_NUL_NAME = re.compile(r'(?<!\\)"\\u0000(?:[^"\\]|\\.)*":')  # a name in JSON that begins with NUL


class Jagged(NamedTuple):
    """The cheapest form of a ragged column for `put`: the rows one after the other, and their lengths.

    `values` is [sum(lengths), *trailing], or [k, sum(lengths)] for a column whose `ragged_dim` is 1.
    """

    values: Tensor
    lengths: Tensor | Sequence[int]


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """Rows by key. Holds metadata only, never a tensor, and is small when sent.

    >>> batch = BatchMeta("train", ("a_0_0", "b_0_0"), ({"order": 1}, {"order": 0}), ("tokens",))
    >>> batch.in_order().keys
    ('b_0_0', 'a_0_0')
    """

    partition: str
    keys: tuple[str, ...]
    tags: tuple[Tags, ...] = ()
    columns: tuple[str, ...] = ()  # known to exist on every row
    cursor: int = field(default=0, compare=False)  # the version of the index that this reflects; see `Queue.list`

    def __post_init__(self) -> None:
        # a frozen dataclass with slots can normalise its fields only by object.__setattr__
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "tags", tuple(self.tags) or tuple({} for _ in self.keys))
        object.__setattr__(self, "columns", tuple(self.columns))
        check_keys(self.keys)
        if len(self.tags) != len(self.keys):
            raise QueueError(f"a batch of {len(self.keys)} keys was given {len(self.tags)} tags")

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Iterable[int]) -> BatchMeta:
        """The rows at these positions, in this order."""
        chosen = [int(i) for i in indices]
        return replace(self, keys=tuple(self.keys[i] for i in chosen), tags=tuple(self.tags[i] for i in chosen))

    def select(self, keys: Iterable[str]) -> BatchMeta:
        """The rows with these keys, in this order; an unknown key is an error."""
        place = {key: i for i, key in enumerate(self.keys)}
        wanted = list(keys)
        unknown = [key for key in wanted if key not in place]
        if unknown:
            raise QueueError(f"the batch of partition {self.partition!r} has no rows {shorten(unknown)}")
        return self.take(place[key] for key in wanted)

    def split(self, num_parts: int) -> list[BatchMeta]:
        """Consecutive parts whose sizes differ by at most one; every key in exactly one part. Parts may be empty."""
        if num_parts < 1:
            raise QueueError(f"a batch is split into 1 part or more, not {num_parts}")
        small, larger = divmod(len(self), num_parts)
        edges = [i * small + min(i, larger) for i in range(num_parts + 1)]
        return [self.take(range(a, b)) for a, b in pairwise(edges)]

    @staticmethod
    def join(parts: Sequence[BatchMeta]) -> BatchMeta:
        """All rows in one batch. Parts must agree in partition and columns, and no key may be in two of them."""
        full = [part for part in parts if len(part)] or list(parts[:1])
        if not full:
            raise QueueError("there is nothing to join: no batch was given")
        first = full[0]
        for other in full[1:]:
            if other.partition != first.partition:
                raise QueueError(f"batches of partitions {first.partition!r} and {other.partition!r} cannot be joined")
            if set(other.columns) != set(first.columns):
                odd = sorted(set(other.columns) ^ set(first.columns))
                raise QueueError(f"batches cannot be joined: only some of them have the columns {odd}")
        keys = tuple(key for part in full for key in part.keys)
        tags = tuple(tag for part in full for tag in part.tags)
        return replace(first, keys=keys, tags=tags, cursor=min(part.cursor for part in full))

    def in_order(self) -> BatchMeta:
        """Rows sorted by (prompt order, session, trajectory), so that results do not depend on completion order."""

        def place(i: int) -> tuple[Json, ...]:
            tags = self.tags[i]
            return (tags.get("order", 0), tags.get("session", -1), tags.get("trajectory", -1), self.keys[i])

        return self.take(sorted(range(len(self)), key=place))

    def with_columns(self, *names: str) -> BatchMeta:
        """The same rows, known to have these columns too."""
        return replace(self, columns=tuple(dict.fromkeys((*self.columns, *names))))


def check_keys(keys: Sequence[str]) -> None:
    """Raise unless all keys are strings and none appears twice."""
    try:
        "".join(keys)  # the fastest check that all are strings
    except TypeError:
        odd = [key for key in keys if not isinstance(key, str)]
        raise QueueError(f"keys are strings, not {shorten(odd)}") from None
    if len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise QueueError(f"keys appear twice: {shorten(twice)}")


def plain_tags(keys: Sequence[str], tags: Sequence[Tags]) -> list[TagDict]:
    """Tags as they come back from JSON, in which they travel and are saved."""
    odd = [key for key, tag in zip(keys, tags, strict=True) if not isinstance(tag, Mapping)]
    if odd:
        raise QueueError(f"the tags of a row must be a dict of names and values; those of {shorten(odd)} are not")
    return [dict(tag) if _is_plain(tag) else _plain_tag(key, tag) for key, tag in zip(keys, tags, strict=True)]


def _is_plain(tag: Tags) -> bool:
    """Whether JSON would return the same values. Asking costs a tenth of the conversion."""
    is_simple = _SIMPLE.issuperset(map(type, tag.values())) and _NAMES.issuperset(map(type, tag))
    return is_simple and "\0" not in "".join(tag)


def _plain_tag(key: str, tag: Tags) -> TagDict:
    try:
        return plain(dict(tag))
    except QueueError as error:
        raise QueueError(f"the tags of row {key!r} are not JSON: {error}") from None


def plain(value: T) -> T:
    """The value as it comes back from JSON. What JSON cannot hold is an error."""
    try:
        text = json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise QueueError(str(error)) from None
    if _NUL_NAME.search(text):
        raise QueueError("a name may not begin with NUL")  # reserved for values that are encoded in addition to tags
    return cast(T, json.loads(text))


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of numpy or torch
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def shorten(names: Iterable[object], limit: int = 8) -> str:
    """Names for a message: at most `limit`, and the number of the others."""
    listed = list(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + rest
