"""From rewards to advantages, through the queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tqppo.algorithms.advantages import EstimateOptions
from tqppo.algorithms.padding import padding_rows
from tqppo.dataflow import Features
from tqppo.errors import DataError
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.workers.estimator import Estimator, EstimatorSpec, describe_rows


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True)
    yield queue
    queue.close()


ENGINE_ONLY = Features(recomputes_old_logprobs=False)


def tags(uid: str, session: int, trajectory: int = 0, *, length: int = 2, **more: Any) -> dict[str, Any]:
    known = {"uid": uid, "session": session, "trajectory": trajectory, "prompt_len": 1, "response_len": length}
    return {**known, "seq_len": length + 1, **more}


def put(queue: Queue, rows: list[dict[str, Any]], rewards: list[float], **columns: float) -> BatchMeta:
    """Rows of these tags; every further column holds one number on all tokens."""
    lengths = [row["response_len"] for row in rows]
    total = sum(lengths)
    given: dict[str, Any] = {
        "tokens": Jagged(torch.full((total + len(rows),), 65), [length + 1 for length in lengths]),
        "response_mask": Jagged(torch.ones(total, dtype=torch.bool), lengths),
        "reward": torch.tensor(rewards),
        **{name: Jagged(torch.full((total,), value), lengths) for name, value in columns.items()},
    }
    keys = [f"{row['uid']}_{row['session']}_{row['trajectory']}" for row in rows]
    return queue.put(keys, given, tags=rows)


def spec(**changes: Any) -> EstimatorSpec:
    settings = {
        "advantage": "grpo",
        "options": EstimateOptions(),
        "max_prompt_tokens": 8,
        "max_response_tokens": 4,
        "features": ENGINE_ONLY,
    }
    return EstimatorSpec(**{**settings, **changes})


def estimate(queue: Queue, batch: BatchMeta, **changes: Any) -> tuple[dict[str, Any], dict[str, float]]:
    kl_coef = changes.pop("kl_coef", 0.0)
    names, metrics = Estimator(spec(**changes), queue).estimate(batch, kl_coef)
    return queue.get(batch, names), metrics


def test_sessions_are_compared_once_and_every_row_of_a_session_gets_its_scalar(queue: Queue) -> None:
    rows = [tags("a", 0, 0), tags("a", 0, 1), tags("a", 1), tags("a", 2, length=3)]
    columns, metrics = estimate(queue, put(queue, rows, [1.0, 1.0, 0.0, 0.0]))
    scalars = [row.tolist()[0] for row in columns["advantages"].unbind()]
    assert scalars == pytest.approx([1.154699, 1.154699, -0.577349, -0.577349], abs=1e-5)
    assert metrics["critic/score/mean"] == pytest.approx(1 / 3)
    assert metrics["training/num_sessions"] == 3


def test_padding_changes_nothing(queue: Queue) -> None:
    rows = [tags("a", 0), tags("a", 1)]
    _, expected = estimate(queue, put(queue, rows, [1.0, 0.0]))
    padded = [tags("b", 0), tags("b", 1), tags("pad0", 0, length=1, is_padding=True)]
    batch = put(queue, padded, [1.0, 0.0, 0.0])
    _, found = estimate(queue, batch)
    assert found == expected


def test_the_kl_penalty_is_taken_off_and_reported(queue: Queue) -> None:
    rows = [tags("a", 0), tags("a", 1)]
    batch = put(queue, rows, [1.0, 0.0], old_logprobs=-1.0, ref_logprobs=-1.5, rollout_logprobs=-1.0)
    _, metrics = estimate(queue, batch, features=Features(kl_in_reward=True), kl_reward="k1", kl_coef=0.1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["critic/rewards/mean"] == pytest.approx(0.5 - 0.1 * 2 * 0.5)
    assert metrics["critic/score/mean"] == pytest.approx(0.5)


def test_corrections_and_rejections_are_columns_of_their_own(queue: Queue) -> None:
    rows = [tags("a", 0), tags("a", 1)]
    batch = put(queue, rows, [1.0, 0.0], old_logprobs=-1.0, rollout_logprobs=-3.0)
    columns, metrics = estimate(
        queue, batch, features=Features(has_correction_weights=True), correction="token", correction_cap=2.0
    )
    assert set(columns["correction_weights"].values().tolist()) == {2.0}
    assert metrics["rollout_corr/rollout_is_max"] == 2.0
    again = put(queue, [tags("b", 0), tags("b", 1)], [1.0, 0.0], old_logprobs=-1.0, rollout_logprobs=-3.0)
    columns, metrics = estimate(
        queue, again, features=Features(has_loss_mask=True), reject="token", reject_threshold=2.0
    )
    assert not columns["loss_mask"].values().any()


def test_gae_adds_returns_and_remax_uses_the_greedy_reward(queue: Queue) -> None:
    rows = [tags("a", 0), tags("a", 1)]
    columns, _ = estimate(
        queue,
        put(queue, rows, [1.0, 0.0], values=0.5),
        features=replace(ENGINE_ONLY, uses_values=True),
        advantage="gae",
        options=EstimateOptions(lam=0.95),
    )
    assert columns["returns"].values().tolist() == pytest.approx([0.975, 1.0, 0.025, 0.0], abs=1e-6)
    again = put(queue, [tags("b", 0), tags("b", 1)], [1.0, 0.0])
    again = queue.put(again, {"baseline_reward": torch.tensor([0.25, 0.25])})
    columns, _ = estimate(queue, again, features=replace(ENGINE_ONLY, has_greedy_baseline=True), advantage="remax")
    assert columns["advantages"].values().tolist() == pytest.approx([0.75, 0.75, -0.25, -0.25])


def test_a_models_score_is_added_with_its_weight(queue: Queue) -> None:
    batch = put(queue, [tags("a", 0), tags("a", 1)], [1.0, 0.0])
    batch = queue.put(batch, {"model_score": torch.tensor([0.0, 2.0])})
    columns, metrics = estimate(
        queue, batch, features=replace(ENGINE_ONLY, has_reward_model=True), model_score_weight=1.0
    )
    assert metrics["critic/score/mean"] == 1.5
    assert columns["advantages"].values()[0] < 0 < columns["advantages"].values()[-1]


def test_gdpo_compares_the_reward_and_the_models_score_each_by_itself(queue: Queue) -> None:
    batch = put(queue, [tags("a", 0), tags("a", 1)], [1.0, 0.0], old_logprobs=-1.0, rollout_logprobs=-1.0)
    batch = queue.put(batch, {"model_score": torch.tensor([0.0, 100.0])})
    columns, _ = estimate(
        queue, batch, advantage="gdpo", model_score_weight=0.5, features=Features(has_reward_model=True)
    )
    assert columns["advantages"].values()[-1] < 0 < columns["advantages"].values()[0]


def test_token_baselines_read_the_old_policys_columns(queue: Queue) -> None:
    same = {"old_logprobs": -1.0, "rollout_logprobs": -1.0, "sum_pi_squared": 0.5}
    batch = put(queue, [tags("a", 0), tags("a", 1)], [1.0, 0.0], **same)
    columns, _ = estimate(queue, batch, advantage="optimal_token_baseline", features=Features(has_token_baseline=True))
    assert columns["advantages"].values().tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5], abs=1e-6)


def test_session_weights_share_one_among_the_rows_of_a_session(queue: Queue) -> None:
    rows = [tags("a", 0, 0), tags("a", 0, 1), tags("a", 1)]
    columns, _ = estimate(
        queue, put(queue, rows, [1.0, 1.0, 0.0]), features=replace(ENGINE_ONLY, has_session_weights=True)
    )
    assert columns["session_weight"].tolist() == [0.5, 0.5, 1.0]


def test_trajectories_are_written_as_text_without_padding(queue: Queue, tmp_path: Path, tiny_model: Path) -> None:
    rows = [tags("a", 0), tags("a", 1), tags("pad0", 0, length=1, is_padding=True)]
    batch = put(queue, rows, [1.0, 0.0, 0.0], rollout_logprobs=-0.5)
    estimator = Estimator(spec(tokenizer=str(tiny_model)), queue)
    estimator.estimate(batch, 0.0)
    estimator.write_trajectories(batch, tmp_path / "step_000001.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "step_000001.jsonl").read_text().splitlines()]
    assert [line["session"] for line in lines] == [0, 1]
    assert lines[0]["logprobs"] == [-0.5, -0.5]
    assert len(lines[0]["response"]) == 2


def test_the_final_row_of_a_session_is_its_highest_trajectory_in_any_order() -> None:
    rows = describe_rows([tags("a", 0, 10), tags("a", 0, 9), tags("b", 0)])
    assert rows.is_final.tolist() == [True, False, True]
    assert rows.group.tolist() == [0, 0, 1]


def test_turns_come_through_the_queue_and_padding_has_none(queue: Queue) -> None:
    """Session 0 earns 1 in its second turn, session 1 nothing; only the first turns begin in one state."""
    rows = [tags("a", 0, length=3), tags("a", 1, length=3)]
    batch = put(queue, rows, [9.0, 9.0])
    counts = [2, 2]
    turns = {
        "turn_ends": Jagged(torch.tensor([1, 3, 2, 3]), counts),
        "turn_rewards": Jagged(torch.tensor([0.0, 1.0, 0.0, 0.0]), counts),
        "turn_anchors": Jagged(torch.tensor([5, 6, 5, 7]), counts),
    }
    batch = queue.put(batch, turns)
    padding = padding_rows(1, dict.fromkeys(batch.columns, ()))
    batch = BatchMeta.join([batch, queue.put(padding.keys, padding.columns, tags=padding.tags)])
    features = replace(ENGINE_ONLY, credits_turns=True)
    options = EstimateOptions(turn_gamma=0.5, gigpo_std=False)
    columns, metrics = estimate(queue, batch, advantage="gigpo", options=options, features=features)
    found = [row.tolist() for row in columns["advantages"].unbind()]
    assert found == [[0.75, 0.5, 0.5], [-0.75, -0.75, -0.5], [0.0]]  # ±½ for the session, ±¼ for the shared state
    assert metrics["critic/score/mean"] == 9.0
    assert metrics["training/step_groups"] == 3


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), 3e38])
def test_rewards_that_would_spoil_the_batch_are_refused_with_their_keys(queue: Queue, reward: float) -> None:
    batch = put(queue, [tags("a", 0), tags("a", 1)], [1.0, reward], rollout_logprobs=-1.0)
    with pytest.raises(DataError, match=r"reward of 1 rows is not finite, or beyond .*: a_1_0 has"):
        estimate(queue, batch)
