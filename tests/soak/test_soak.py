"""The verdict of a soak: what grows is found, what jumps or settles is not."""

from __future__ import annotations

import random

import pytest
from soak.__main__ import report
from soak.slopes import slope

STEPS = list(range(0, 2000, 40))


def test_a_slope_is_that_of_the_line_through_the_samples() -> None:
    found = slope(STEPS, [100 + 0.002 * step for step in STEPS])
    assert found is not None
    assert found.per_1000 == pytest.approx(2.0)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.grows(1.0)
    assert not found.grows(2.5)


def test_noise_and_a_warm_up_are_no_growth() -> None:
    rng = random.Random(0)
    noisy = slope(STEPS, [100 + rng.uniform(-5, 5) for _ in STEPS])
    settled = slope(STEPS, [min(step, 400) for step in STEPS])
    assert noisy is not None
    assert settled is not None
    assert not noisy.grows(1.0)
    assert not settled.grows(1.0)


def test_too_few_samples_have_no_slope() -> None:
    assert slope([1, 2, 3], [1, 2, 3]) is None


def test_a_leak_in_one_process_fails_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    still, leaking = ("driver 1", "rss_mb"), ("worker 2", "descriptors")
    assert report([(step, {still: 300.0, leaking: step / 100}) for step in STEPS]) == 1
    printed = capsys.readouterr().out
    assert "worker 2" in printed
    assert "GROWS" in printed
    assert report([(step, {still: 300.0}) for step in STEPS]) == 0
