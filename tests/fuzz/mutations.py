"""Seeded damage: bytes that are cut, flipped and repeated, and values of JSON or TOML that become other values."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

PIECES = (
    b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\r", b"\n\n", b"[" * 3000, b'{"a":' * 300, b"9" * 5000,
    b"-1", b"1e999", b"NaN", b"null", b"true", b'"', b"'''", b"\\", b"\\ud800", b"#", b"=", b"../../", b"/dev/zero",
    b"=\n[", b"[[", b"]]", b"{}", b"0x", b"1979-05-27", b"\xf0\x9f\x92\xa9",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, 2**32 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64, 10**30)
TEXTS = (
    "", "a", "tiny", "\x00", "\x1b]0;x\x07", "\ud800", "../../etc/passwd", "/dev/zero", "/", "x" * 70_000, "é", "{",
    "{{ 1/0 }}", "%s", "nan", "1e400", "9" * 5000, "None", "auto", "\u202e", "F32", "BOOL", "[1]", "*", "a.b.c", "{}",
)  # fmt: skip
MAX_CHANGES = 4

Bytes = Callable[[random.Random, bytes], bytes]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes after one to four changes."""
    for _ in range(rng.randint(1, MAX_CHANGES)):
        data = rng.choice(BYTE_CHANGES)(rng, data)
    return data


def flipped(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    begin = rng.randint(0, len(data))
    return begin, min(len(data), begin + int(rng.expovariate(1 / 24)) + 1)


def _remove(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 50)) + data[end:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(PIECES) + data[at:]


def _replace(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + rng.choice((rng.randbytes(end - begin), rng.choice(PIECES))) + data[end:]


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"\n".join(lines)


BYTE_CHANGES: Sequence[Bytes] = (flipped, flipped, _cut, _remove, _repeat, _insert, _insert, _replace, _swap_lines)


def changed(rng: random.Random, value: object) -> object:
    """A copy of a value with one to four of its parts changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, MAX_CHANGES)):
        value = _change_somewhere(rng, value)
    return value


def _change_somewhere(rng: random.Random, value: object) -> object:
    """Walk down to a random part, a list or table being changed itself one time in four, and change it."""
    if isinstance(value, dict) and value and rng.random() < 0.75:
        key = rng.choice(list(value))
        value[key] = _change_somewhere(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.75:
        index = rng.randrange(len(value))
        value[index] = _change_somewhere(rng, value[index])
        return value
    return _changed_part(rng, value)


def _changed_part(rng: random.Random, value: object) -> object:
    if isinstance(value, dict) and rng.random() < 0.7:
        return _changed_table(rng, value)
    if isinstance(value, list) and rng.random() < 0.7:
        return rng.choice((value[:-1], value + value[:1], value[::-1], [*value, another(rng)]))
    if isinstance(value, int) and rng.random() < 0.7:
        return rng.choice((value + 1, value - 1, -value, value * 2, *NUMBERS))
    if isinstance(value, str) and rng.random() < 0.5:
        return damaged(rng, value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return another(rng)


def _changed_table(rng: random.Random, value: dict[object, object]) -> object:
    name = rng.choice(list(value)) if value else "a"
    how = rng.randrange(3)
    if how == 0 and value:
        del value[name]
    elif how == 1 and value:
        value[rng.choice(TEXTS)] = value.pop(name)
    else:
        value[rng.choice(TEXTS)] = another(rng)
    return value


def another(rng: random.Random) -> object:
    """Any value, unrelated to what was there."""
    deep: object = 1
    for _ in range(rng.choice((2, 60, 150))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    plain = (rng.choice(NUMBERS), rng.choice(TEXTS), rng.uniform(-2, 2), float("inf"), float("nan"), None, True, False)
    one = rng.choice(plain)
    return rng.choice((one, one, [], {}, [one], {"a": one}, deep))
