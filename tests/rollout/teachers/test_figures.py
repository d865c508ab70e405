"""What teachers did, as metrics of a step."""

from __future__ import annotations

import pytest

from tqppo.rollout.teachers.figures import RolloutReport, TeacherFigures, quantile


def report(**figures: object) -> RolloutReport:
    return RolloutReport({"math": TeacherFigures(**figures)}, exposed_s=1.0)  # type: ignore[arg-type]


def test_workers_side_by_side_add_their_counts_and_share_the_time() -> None:
    one = report(requests=2, rows=8, tokens=100, cached_rows=3, seconds=[1.0, 2.0], span_s=3.0)
    other = report(requests=1, rows=4, tokens=50, seconds=[5.0], span_s=5.0)
    metrics = RolloutReport.join([one, other]).metrics()
    assert metrics["teacher/math/requests"] == 3.0
    assert metrics["teacher/math/rows"] == 12.0
    assert metrics["teacher/math/cache_hits"] == 3.0
    assert metrics["teacher/math/tokens_per_s"] == pytest.approx(150 / 5)
    assert (metrics["teacher/math/latency_s/p50"], metrics["teacher/math/latency_s/p95"]) == (2.0, 5.0)
    assert metrics["teacher/exposed_s"] == 1.0


def test_rounds_one_after_the_other_add_their_time_too() -> None:
    rounds = [report(tokens=100, seconds=[3.0], span_s=3.0), report(tokens=50, seconds=[2.0], span_s=2.0)]
    metrics = RolloutReport.join(rounds, one_after_the_other=True).metrics()
    assert metrics["teacher/math/tokens_per_s"] == pytest.approx(150 / 5)
    assert metrics["teacher/exposed_s"] == 2.0


def test_a_run_without_teachers_has_no_such_metrics() -> None:
    assert RolloutReport.join([RolloutReport(), RolloutReport()]).metrics() == {}


def test_quantiles_are_values_that_occurred() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.95) == 1.0
