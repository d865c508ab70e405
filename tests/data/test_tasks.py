"""Procedural tasks: right answers, determinism, and a split without overlap."""

from __future__ import annotations

import random

import pytest

from tqppo.data import tasks
from tqppo.errors import DataError, UsageError


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("sort", "3142", "1234"),
        ("reverse", "abcd", "dcba"),
        ("add", "12+34=", "46"),
        ("count", "b:abcabb", "3"),
        ("maximum", "17 4 56", "56"),
    ],
)
def test_docstring_of_a_task_shows_a_problem_and_its_answer(name: str, text: str, answer: str) -> None:
    assert f"`{text}` → `{answer}`" in (tasks.TASKS[name].__doc__ or "")


@pytest.mark.parametrize("name", tasks.TASKS)
def test_problem_depends_on_seed_and_index_only(name: str) -> None:
    task, again = tasks.load(name), tasks.load(name)
    problems = [task.problem(i, seed=3) for i in range(20)]
    random.seed(0)
    assert problems == [again.problem(i, seed=3) for i in range(20)]
    assert problems != [task.problem(i, seed=4) for i in range(20)]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_training_and_held_out_problems_never_overlap(name: str) -> None:
    task = tasks.load(name)
    trained = {task.problem(i, seed=0).canonical for i in range(1500)}
    held_out = {task.problem(i, seed=seed, held_out=True).canonical for seed in (0, 1) for i in range(300)}
    assert held_out
    assert not trained & held_out


def test_every_ordering_of_a_multiset_is_on_the_same_side() -> None:
    held_out = {tasks.load("sort").problem(i, held_out=True).answer for i in range(500)}
    trained = {tasks.load("sort").problem(i).answer for i in range(5000)}
    assert not held_out & trained
    assert 100 < len(held_out) < 200  # about a fifth of the 715 multisets


def test_sort_and_add_and_arithmetic_answers_are_right() -> None:
    for i in range(200):
        problem = tasks.load("sort", {"digits": 5}).problem(i)
        assert len(problem.text) == 5
        assert list(problem.answer) == sorted(problem.text)
        a, b = tasks.load("add").problem(i).text.rstrip("=").split("+")
        assert tasks.load("add").problem(i).answer == str(int(a) + int(b))


@pytest.mark.parametrize(
    ("numbers", "signs", "value"),
    [([3, 4, 5], "*-", 7), ([3, 4, 5], "+*", 23), ([1, 2, 3, 4], "-*-", -9), ([7], "", 7), ([2, 3, 4], "--", -5)],
)
def test_evaluate_follows_precedence(numbers: list[int], signs: str, value: int) -> None:
    assert tasks.evaluate(numbers, list(signs)) == value


def test_task_too_small_to_be_split_says_so() -> None:
    task = tasks.load("reverse", {"length": 1, "letters": "a"})  # its only problem is on one side
    empty = not tasks.is_held_out("reverse/a")
    with pytest.raises(DataError, match="too few problems"):
        task.problem(0, held_out=empty)


def test_unknown_task_and_argument_name_the_known_ones() -> None:
    with pytest.raises(UsageError, match="tasks: sort, reverse"):
        tasks.load("sorting")
    with pytest.raises(UsageError, match="arguments: digits"):
        tasks.load("sort", {"digit": 3})
    with pytest.raises(UsageError, match="should be of type int"):
        tasks.load("sort", {"digits": "four"})
    with pytest.raises(UsageError, match="at least 1"):
        tasks.load("sort", {"digits": 0})


def test_partial_credit_chooses_the_reward() -> None:
    assert tasks.load("sort").reward == "exact_match"
    assert tasks.load("sort", {"partial_credit": True}).reward == "partial_match"
