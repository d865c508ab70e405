from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tqppo.workers.critic import Critic
from tqppo.workers.specs import OptimizerSpec, RoleSpec, ValueLossSpec


def make(spec: RoleSpec, **changes: Any) -> Critic:
    critic = Critic(replace(spec, **changes))
    critic.start()
    return critic


def test_values_have_the_responses_layout(spec: RoleSpec, rows: dict[str, Any]) -> None:
    critic = make(spec)
    critic.update(rows, step=1)
    values = critic.values(rows)["values"]
    assert values.offsets().tolist() == rows["response_mask"].offsets().tolist()
    assert values.values().abs().min() > 0


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "session-mean"])
def test_an_update_does_not_depend_on_the_micro_batches(spec: RoleSpec, rows: dict[str, Any], aggregate: str) -> None:
    loss = ValueLossSpec(aggregate=aggregate)
    whole, cut = (make(spec, value_loss=loss, micro_batch_tokens=budget) for budget in (100_000, 40))
    metrics = [critic.update(rows, step=1, sizes=[4, 4]) for critic in (whole, cut)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_loss_by_hand(spec: RoleSpec, rows: dict[str, Any]) -> None:
    mask = rows["response_mask"].values()
    expected = 0.5 * rows["returns"].values()[mask].square().mean()  # a fresh critic says 0 everywhere
    metrics = make(spec, value_loss=ValueLossSpec(clip=0.0)).update(rows, step=1)
    assert metrics["critic/vf_loss"] == pytest.approx(float(expected))
    assert metrics["critic/vpred_mean"] == 0


def test_it_learns_its_returns(spec: RoleSpec, rows: dict[str, Any]) -> None:
    critic = make(spec, value_loss=ValueLossSpec(clip=0.0), optimizer=OptimizerSpec(lr=3e-3))
    losses = [critic.update(rows, step=step)["critic/vf_loss"] for step in range(1, 16)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_saved_critic_continues_to_the_bit(spec: RoleSpec, rows: dict[str, Any], tmp_path: Path) -> None:
    original, resumed = make(spec), make(spec)
    original.update(rows, step=1)
    original.save(str(tmp_path))
    resumed.load(str(tmp_path))
    assert original.update(rows, step=2) == resumed.update(rows, step=2)
    assert torch.equal(original.values(rows)["values"].values(), resumed.values(rows)["values"].values())
