"""Procedural tasks with verifiable answers, small enough for a tiny model. `dataset` turns them into rows.

A problem depends only on (seed, index). Training and held-out problems never overlap: the split is a hash of the
*canonical* problem, so `3142` and `1234`, which have the same answer, are on the same side.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tqppo import builtin
from tqppo.data import lookup as codes
from tqppo.errors import DataError

HELD_OUT_SHARE = 0.2
MAX_DRAWS = 1000  # a part of the split that needs more draws than this counts as empty


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its only right answer, and a text that all rewordings of the problem share.

    `shown` is what a warm start learns from it: messages, and what the assistant says next. None: the answer itself.
    """

    text: str
    answer: str
    canonical: str
    shown: tuple[list[dict[str, object]], str] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A named stream of problems. `reward` is the built-in reward function for its answers."""

    name: str
    draw: Callable[[random.Random], Problem]
    reward: str = "exact_match"
    arguments: tuple[tuple[str, object], ...] = ()

    def problem(self, index: int, *, seed: int = 0, held_out: bool = False) -> Problem:
        """The index-th problem of the training or held-out part: the first draw that belongs to it."""
        rng = random.Random(f"{self.name}/{seed}/{'held-out' if held_out else 'train'}/{index}")
        for _ in range(MAX_DRAWS):
            problem = self.draw(rng)
            if is_held_out(f"{self.name}/{problem.canonical}") == held_out:
                return problem
        part = "held-out" if held_out else "training"
        raise DataError(
            f"task {self.name!r} with {dict(self.arguments)} has too few problems for a {part} part; make it larger"
        )


def is_held_out(canonical: str) -> bool:
    """Whether a problem is in the held-out part; the same for every run, seed and machine."""
    digest = hashlib.blake2b(canonical.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def sort(*, digits: int) -> Callable[[random.Random], Problem]:
    """`3142` → `1234`. Held out by multiset: no ordering of a held-out multiset is ever trained on."""

    def draw(rng: random.Random) -> Problem:
        text = "".join(rng.choices("0123456789", k=digits))
        answer = "".join(sorted(text))
        return Problem(text, answer, answer)

    return draw


def reverse(*, length: int, letters: str) -> Callable[[random.Random], Problem]:
    """`abcd` → `dcba`. A word and its mirror image are one problem."""

    def draw(rng: random.Random) -> Problem:
        text = "".join(rng.choices(letters, k=length))
        return Problem(text, text[::-1], min(text, text[::-1]))

    return draw


def add(*, digits: int) -> Callable[[random.Random], Problem]:
    """`12+34=` → `46`. Both orders of the summands are one problem."""

    def draw(rng: random.Random) -> Problem:
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        return Problem(f"{a}+{b}=", str(a + b), f"{min(a, b)}+{max(a, b)}")

    return draw


def arithmetic(*, terms: int, largest: int, operators: str) -> Callable[[random.Random], Problem]:
    """`3*4-5=` → `7`, with the usual precedence."""

    def draw(rng: random.Random) -> Problem:
        numbers = [rng.randint(0, largest) for _ in range(terms)]
        signs = rng.choices(operators, k=terms - 1)
        text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))
        return Problem(f"{text}=", str(evaluate(numbers, signs)), text)

    return draw


def count(*, length: int, letters: str) -> Callable[[random.Random], Problem]:
    """`b:abcabb` → `3`: the number of times that the letter before the colon occurs after it."""

    def draw(rng: random.Random) -> Problem:
        text, letter = "".join(rng.choices(letters, k=length)), rng.choice(letters)
        return Problem(f"{letter}:{text}", str(text.count(letter)), f"{letter}:{''.join(sorted(text))}")

    return draw


def maximum(*, numbers: int, digits: int) -> Callable[[random.Random], Problem]:
    """`17 4 56` → `56`. Held out by the numbers, in any order."""

    def draw(rng: random.Random) -> Problem:
        drawn = [rng.randrange(10**digits) for _ in range(numbers)]
        return Problem(" ".join(map(str, drawn)), str(max(drawn)), " ".join(map(str, sorted(drawn))))

    return draw


def lookup() -> Callable[[random.Random], Problem]:
    """`kxq` → `=42`, which only the tool `tqppo.data.lookup:f` knows."""

    def draw(rng: random.Random) -> Problem:
        code = codes.random_code(rng)
        return Problem(code, codes.answer_of(code), code, codes.demonstration(code, rng))

    return draw


def evaluate(numbers: list[int], signs: list[str]) -> int:
    """The value of a chain of +, − and × with the usual precedence."""
    total, product = 0, numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            product *= number
        else:
            total, product = total + product, number if sign == "+" else -number
    return total + product


TASKS: dict[str, Callable[..., Callable[[random.Random], Problem]]] = {
    "sort": sort,
    "reverse": reverse,
    "add": add,
    "arithmetic": arithmetic,
    "count": count,
    "maximum": maximum,
    "lookup": lookup,
}
REWARDS = {False: "exact_match", True: "partial_match"}


def load(name: str, arguments: Mapping[str, object] | None = None) -> Task:
    """Make a task. `partial_credit = true` rewards the share of right characters instead of all or nothing."""
    given = dict(arguments or {})
    builtin.check_task_arguments(name, given)
    partial = bool(given.pop("partial_credit", False))
    draw = TASKS[name](**{**builtin.TASKS[name], **given})
    return Task(name, draw, REWARDS[partial], tuple(sorted(given.items())))
