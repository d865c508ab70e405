"""Figures of the mismatch between engine and trainer, against numbers worked by hand."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from tqppo.doctor.compare import advise, compare, render
from tqppo.errors import EngineError


def test_figures_of_two_tokens_by_hand() -> None:
    found = compare([[math.log(0.5), math.log(0.2)]], [[math.log(0.4), math.log(0.25)]], tokens=[[65, 66]])
    deltas = [math.log(0.8), math.log(1.25)]
    assert found.mean_abs == pytest.approx((abs(deltas[0]) + abs(deltas[1])) / 2)
    assert found.max_abs == pytest.approx(math.log(1.25))
    assert found.k1 == pytest.approx(0.0, abs=1e-12)
    assert found.k3 == pytest.approx((0.8 - 1 + 1.25 - 1) / 2)  # the logarithms cancel
    assert found.ess_token == pytest.approx((0.8 + 1.25) ** 2 / (0.8**2 + 1.25**2) / 2)
    assert found.ess_sequence == pytest.approx(1.0)
    assert found.pearson == pytest.approx(1.0)
    assert (found.num_sequences, found.num_tokens) == (1, 2)


def test_equal_sides_need_no_correction() -> None:
    found = compare([[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]], tokens=[[1, 2], [3]])
    assert (found.correction, found.max_abs, found.k3, found.ess_sequence) == ("none", 0.0, 0.0, 1.0)


def test_advice_follows_the_kind_of_mismatch() -> None:
    small = {"mean_abs": 1e-4, "max_abs": 0.01, "ess_sequence": 1.0, "outliers": 0.0}
    assert advise(**small)[0] == "none"
    assert advise(**{**small, "mean_abs": 0.01, "outliers": 0.01})[0] == "icepop"
    assert advise(**{**small, "mean_abs": 0.01, "ess_sequence": 0.9})[0] == "sequence"
    assert advise(**{**small, "mean_abs": 0.01, "ess_sequence": 0.1})[0] == "token"


def test_the_worst_tokens_come_first_with_their_text() -> None:
    found = compare(
        [[-1.0, -1.0, -1.0]], [[-1.0, -3.0, -1.5]], tokens=[[72, 105, 33]], decode=lambda ids: "".join(map(chr, ids))
    )
    assert [(w.token, w.context, w.position) for w in found.worst[:2]] == [("i", "H", 1), ("!", "Hi", 2)]


def test_it_prints_and_serialises() -> None:
    found = compare([[-1.0]], [[-1.2]], tokens=[[72]])
    console = Console(width=100, file=io.StringIO())
    console.print(render(found, title="embedded against transformers"))
    assert 'algorithm.correction = "' in console.file.getvalue()
    assert json.loads(json.dumps(found.as_dict()))["num_tokens"] == 1


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(EngineError, match="sampled no token"):
        compare([[]], [[]], tokens=[[]])
