"""Validation figures against numbers worked by hand."""

from __future__ import annotations

import pytest

from tqppo.metrics import validation
from tqppo.metrics.validation import Answer


def _answers(rows: dict[str, str], *, right: str = "a", source: str = "sort") -> list[Answer]:
    """One sampled answer per letter of each prompt."""
    return [
        Answer(prompt, source, float(letter == right), {"acc": float(letter == right)}, letter)
        for prompt, letters in rows.items()
        for letter in letters
    ]


def test_mean_best_and_majority_of_two_prompts() -> None:
    found = validation.figures(_answers({"p": "aabb", "q": "bbba"}))
    assert found["val-core/sort/acc/mean@4"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["val-core/sort/acc/best@4"] == 1.0
    # p is a tie of right and wrong, q goes to the wrong answer
    assert found["val-core/sort/acc/maj@4"] == pytest.approx((0.5 + 0.0) / 2)
    # of 6 pairs, p has 1 without an `a`, q has 3
    assert found["val-aux/sort/acc/best@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert found["val-aux/sort/acc/worst@4"] == 0.0
    assert found["val-aux/sort/reward/mean@4"] == found["val-core/sort/acc/mean@4"]


def test_best_of_n_is_the_expected_maximum_over_subsets() -> None:
    # pairs of (1, 2, 4): maxima 2, 4, 4
    assert validation.best_of([4.0, 1.0, 2.0], 2) == pytest.approx(10 / 3)
    assert validation.best_of([4.0, 1.0, 2.0], 1) == pytest.approx(7 / 3)
    assert validation.best_of([4.0, 1.0, 2.0], 3) == 4.0


def test_greedy_answers_stand_apart_from_sampled_ones() -> None:
    sampled = _answers({"p": "b", "q": "b"})
    greedy = [
        Answer("p", "sort", 1.0, {"acc": 1.0}, is_greedy=True),
        Answer("q", "sort", 0.0, {"acc": 0.0}, is_greedy=True),
    ]
    found = validation.figures(sampled + greedy)
    assert found["val-core/sort/acc/greedy"] == 0.5
    assert found["val-core/sort/acc/mean@1"] == 0.0


def test_without_acc_the_reward_is_the_core_figure() -> None:
    found = validation.figures([Answer("p", "code", 0.25), Answer("p", "code", 0.75)])
    assert found["val-core/code/reward/mean@2"] == 0.5
    assert found["val-core/code/reward/best@2"] == 0.75
    assert not any("maj@" in name for name in found)


def test_sources_are_kept_apart_and_order_does_not_matter() -> None:
    answers = _answers({"p": "ab"}) + _answers({"q": "aa"}, source="add")
    found = validation.figures(answers)
    assert found["val-core/sort/acc/mean@2"] == 0.5
    assert found["val-core/add/acc/mean@2"] == 1.0
    assert found == validation.figures(answers[::-1])


@pytest.mark.slow
def test_more_subsets_than_the_limit_are_drawn_alike_each_time() -> None:
    rows = {"p": "aaaaaaaabbbbbbbb"}
    first = validation.figures(_answers(rows))
    assert first == validation.figures(_answers(rows))
    assert 0.4 < first["val-aux/sort/acc/maj@8"] < 0.6
