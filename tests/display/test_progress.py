from __future__ import annotations

import pytest

from tqppo.display.progress import Progress, Validated


def test_the_pace_is_the_mean_of_the_last_steps_and_gives_the_time_left() -> None:
    progress = Progress("x", max_steps=10)
    for step, seconds in ((1, 2.0), (2, 4.0)):
        progress.add(step, {"timing_s/step": seconds, "perf/total_num_tokens": 30.0})
    assert progress.seconds_per_step == 3.0
    assert progress.seconds_left == 24.0
    assert progress.tokens_per_second == pytest.approx(10.0)


def test_the_first_validation_stays_and_the_last_moves() -> None:
    progress = Progress("x")
    progress.add(0, {"val-core/sort/acc/greedy": 0.1, "val-core/sort/acc/mean@1": 0.2})
    progress.add(5, {"val-core/sort/acc/greedy": 0.5})
    assert progress.validations() == [
        Validated("sort acc, sampled", 0.2, 0.2, 5),
        Validated("sort acc, greedy", 0.1, 0.5, 5),
    ]
    progress.add(6, {"critic/score/mean": 0.3})
    assert progress.fresh_validation() == []
    assert progress.reward == [0.3]


def test_the_first_metric_of_a_label_is_shown() -> None:
    progress = Progress("x")
    progress.add(1, {"actor/kl_loss": 0.5, "actor/reward_kl_penalty": 0.7, "timing_s/gen": 1.0, "timing_s/step": 2.0})
    assert dict(progress.figures())["KL ref"] == "0.500"
    assert progress.stage_seconds() == {"gen": 1.0}


def test_recalled_steps_do_not_count_for_the_pace() -> None:
    progress = Progress("x", max_steps=4)
    progress.add(1, {"timing_s/step": 100.0})
    progress.restart_clock()
    assert progress.seconds_per_step == 0.0
    assert progress.steps == 1


def test_stages_are_those_of_the_last_steps_together() -> None:
    progress = Progress("x")
    progress.add(1, {"timing_s/gen": 1.0, "timing_s/step": 2.0})
    progress.add(2, {"timing_s/gen": 1.0, "timing_s/testing": 3.0, "timing_s/step": 5.0})
    assert progress.stage_seconds() == {"gen": 2.0, "testing": 3.0}


def test_a_run_that_is_over_has_a_clock_that_stands_still() -> None:
    progress = Progress("x", max_steps=1)
    progress.recall([{"step": 0, "val-core/sort/acc/greedy": 0.1}, {"step": 1, "critic/score/mean": 0.5, "bad": None}])
    progress.stop_clock(83.0)
    assert progress.elapsed == 83.0
    assert progress.reward == [0.5]
