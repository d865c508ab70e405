"""Trajectories become rows: keys, tags and columns, by hand."""

from __future__ import annotations

import torch

from tqppo.data.prompts import Prompt
from tqppo.protocols import Sampling
from tqppo.queue.meta import Jagged
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.loops.base import Trajectory
from tqppo.rollout.writer import ANSWER_CHARACTERS, Outcome, group_marker, group_rows, row_columns

PROMPT = Prompt("p0-0-3", 3, [1, 2], "a", "sort", {}, "text")
TRAIN = Assignment(seed=0, step=1, group_size=2, sampling=Sampling())
REMAX = Assignment(seed=0, step=1, group_size=2, sampling=Sampling(), greedy=True)
VALIDATE = Assignment(seed=0, step=0, group_size=1, sampling=Sampling(), greedy=True, keep_tensors=False)


def trajectory(*response: int) -> Trajectory:
    return Trajectory([1, 2], response, [True] * len(response), [-0.5] * len(response), "stop", 4)


def outcome(session: int, reward: float, *trajectories: Trajectory, answer: str = "x") -> Outcome:
    return Outcome(session, list(trajectories), reward, answer, {})


def test_a_row_per_trajectory_with_its_tags() -> None:
    rows = group_rows(
        9, PROMPT, [outcome(0, 1.0, trajectory(5), trajectory(6, 7)), outcome(1, 0.5, trajectory(8))], TRAIN
    )
    assert [row.key for row in rows] == ["p0-0-3_0_0", "p0-0-3_0_1", "p0-0-3_1_0"]
    assert rows[1].tags == {
        "uid": "p0-0-3", "session": 0, "trajectory": 1, "order": 9, "prompt_len": 2, "response_len": 2, "seq_len": 4,
        "reward": 1.0, "finish": "stop", "turns": 1, "weight_version": 4, "source": "sort",
    }  # fmt: skip


def test_columns_are_flat_and_in_the_order_of_the_rows() -> None:
    rows = group_rows(0, PROMPT, [outcome(0, 1.0, trajectory(5)), outcome(1, 0.5, trajectory(6, 7))], TRAIN)
    columns = row_columns(rows)
    assert list(columns) == ["tokens", "response_mask", "rollout_logprobs", "reward"]
    tokens = columns["tokens"]
    assert isinstance(tokens, Jagged)
    assert tokens.values.tolist() == [1, 2, 5, 1, 2, 6, 7]
    assert torch.as_tensor(tokens.lengths).tolist() == [3, 4]
    reward = columns["reward"]
    assert isinstance(reward, torch.Tensor)
    assert reward.tolist() == [1.0, 0.5]


def test_the_baseline_is_a_tag_and_a_column_of_every_row_and_no_row_itself() -> None:
    outcomes = [outcome(0, 1.0, trajectory(5)), outcome(1, 0.5, trajectory(6)), outcome(2, 0.25, trajectory(7))]
    rows = group_rows(0, PROMPT, outcomes, REMAX)
    assert [row.tags["baseline"] for row in rows] == [0.25, 0.25]
    baseline = row_columns(rows)["baseline_reward"]
    assert isinstance(baseline, torch.Tensor)
    assert baseline.tolist() == [0.25, 0.25]


def test_a_group_whose_baseline_failed_has_no_rows() -> None:
    assert group_rows(0, PROMPT, [outcome(0, 1.0, trajectory(5)), outcome(1, 0.5, trajectory(6))], REMAX) == []


def test_validation_rows_carry_the_answer_and_mark_the_last_trajectory() -> None:
    outcomes = [outcome(0, 1.0, trajectory(5), trajectory(6), answer="y" * 500), outcome(1, 0.0, trajectory(7))]
    rows = group_rows(0, PROMPT, outcomes, VALIDATE)
    assert [row.tags["last"] for row in rows] == [False, True, True]
    assert rows[0].tags["answer"] == "y" * ANSWER_CHARACTERS
    assert "baseline" not in rows[0].tags


def test_the_marker_says_how_the_group_ended() -> None:
    good = outcome(0, 1.0, trajectory(5))
    dropped = Outcome(1, [trajectory(5)], 0.0, "", {}, drop_group=True)
    assert group_marker(2, 1, [good], [])["status"] == "finished"
    assert group_marker(2, 0, [outcome(0, 0.0)], [])["status"] == "failed"
    assert group_marker(2, 2, [good, dropped], [])["status"] == "dropped"
    failed = group_marker(2, 1, [good], [ValueError("no tool")])
    assert failed == {
        "is_prompt": True,
        "status": "failed",
        "order": 2,
        "rows": 1,
        "error": "ValueError: no tool",
        "failed_sessions": 1,
        "retries": 0,
    }


def test_the_greedy_session_comes_last() -> None:
    assert (TRAIN.num_sessions, REMAX.num_sessions, VALIDATE.num_sessions) == (2, 3, 2)
