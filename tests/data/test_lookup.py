"""The task whose answers only a tool knows."""

from __future__ import annotations

from random import Random

import pytest

from tqppo.data import lookup, tasks
from tqppo.data.prompts import DataSpec, demonstrations

CODES = [lookup.random_code(Random(i)) for i in range(300)]


def test_every_code_leads_to_its_answer_within_two_calls() -> None:
    for code in CODES:
        found = lookup.f(code)
        found = found if found.isdigit() else lookup.f(found)
        assert found == lookup.answer_of(code)
    assert 0.4 < sum(map(lookup.is_final, CODES)) / len(CODES) < 0.6


def test_guessing_is_right_one_time_in_ten() -> None:
    answers = [lookup.answer_of(code) for code in CODES]
    assert max(answers.count(str(digit)) for digit in range(10)) < 0.2 * len(answers)


@pytest.mark.parametrize("code", ["", "ab", "abcd", "abz", "ABC", "a c"])
def test_what_is_no_code_is_an_error(code: str) -> None:
    with pytest.raises(ValueError, match="3 letters"):
        lookup.f(code)


def test_demonstrations_show_calls_rarely_and_answers_that_stand_there_always() -> None:
    shown = demonstrations(DataSpec(train="task:lookup"), seed=1)[:2000]
    without_answer = [said for messages, said in shown if not str(messages[-1]["content"]).isdigit()]
    assert 0.07 < sum(said.startswith("@f(") for said in without_answer) / len(without_answer) < 0.13
    for messages, said in shown:
        last = str(messages[-1]["content"])
        assert said in (last, f"@f({last})", f"?f({last})")


def test_held_out_codes_are_never_trained_on() -> None:
    task = tasks.load("lookup")
    parts = [{task.problem(i, held_out=held_out).text for i in range(300)} for held_out in (False, True)]
    assert not parts[0] & parts[1]
