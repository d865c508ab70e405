"""Where the time of a step went."""

from __future__ import annotations

import pytest

from tqppo.run.live import timings


def test_what_no_stage_accounts_for_is_other() -> None:
    found = timings({"timing_s/gen": 1.0, "timing_s/update_actor": 0.5}, 2.0, 400.0)
    assert found["timing_s/other"] == pytest.approx(0.5)
    assert found["timing_s/step"] == 2.0
    assert found["perf/throughput"] == 200.0


def test_parts_that_overlap_leave_no_negative_rest() -> None:
    assert timings({"timing_s/gen": 3.0}, 2.0, 0.0)["timing_s/other"] == 0.0
