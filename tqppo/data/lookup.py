"""A task whose answers only a tool knows: `task:lookup`, and the tool `f` that looks codes up.

The value of a code is a hash of it, so that no model computes it, and values of held-out codes cannot be learnt by
heart. Half of the codes lead to another code first: their sessions need two calls. The warm start shows how a call and
an answer look, and mostly guesses: when to call is left to reinforcement learning.
"""

from __future__ import annotations

import random
from hashlib import blake2b

LETTERS = "abcdefghij"
CODE_LENGTH = 3
CALLS = 0.1  # share of calls among the demonstrations that know no answer; the others write `?` instead of `@`


def f(code: str) -> str:
    """Look a code up.

    Args:
        code: three letters

    Returns what the code stands for, such as `=42`, or another code that has to be looked up instead.
    """
    if len(code) != CODE_LENGTH or not set(code) <= set(LETTERS):
        raise ValueError(f"a code has {CODE_LENGTH} letters from a to j")
    return value_of(code) if is_final(code) else next_code(code)


def value_of(code: str) -> str:
    return str(_number(code, "value") % 10)


def is_final(code: str) -> bool:
    """Whether the code has a value; the others lead to a code that has one."""
    return _number(code, "kind") % 2 == 0


def next_code(code: str) -> str:
    rng = random.Random(_number(code, "next"))
    return next(found for found in iter(lambda: random_code(rng), None) if is_final(found))


def answer_of(code: str) -> str:
    return value_of(code if is_final(code) else next_code(code))


def random_code(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=CODE_LENGTH))


def demonstration(code: str, rng: random.Random) -> tuple[list[dict[str, object]], str]:
    """One turn of a session: the first, or the one after a call. Calls are rare where a guess is possible."""
    messages: list[dict[str, object]] = [{"role": "user", "content": code}]
    if rng.random() < 0.5:
        shown = random_code(rng)
        result = value_of(shown) if rng.random() < 0.5 else shown
        called: list[dict[str, object]] = [
            {"role": "assistant", "content": f"@f({code})"},
            {"role": "tool", "content": result},
        ]
        messages, code = messages + called, result
    if code.isdigit():
        return messages, code
    return messages, f"{'@' if rng.random() < CALLS else '?'}f({code})"


def _number(code: str, what: str) -> int:
    return int.from_bytes(blake2b(f"{what}/{code}".encode(), digest_size=4).digest(), "big")
