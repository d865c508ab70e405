"""The plan that `validate-config` prints is what the run does: roles, stages and columns."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from trainers.fakes import fake_run

from tqppo import dataflow
from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.config.plan.plan import make_plan
from tqppo.config.read.presets import list_presets
from tqppo.queue.client import Queue

OVERRIDES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "engine's log-probabilities": ("algorithm.old_logprobs=rollout", "algorithm.correction=none"),
    "KL in the loss": ("algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.01"),
    "KL without weight": ("algorithm.kl_loss=k3",),
    "KL in the reward": ("algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.01"),
    "LoRA with KL": ("model.lora_rank=8", "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.01"),
    "LoRA with a reference of its own": (
        "model.lora_rank=8",
        "algorithm.kl_loss=k3",
        "algorithm.kl_loss_coef=0.01",
        "reference.path=base",
    ),
    "reward model": ("reward_model.path=scores", "algorithm.filter_groups=false"),
    "correction": ("algorithm.old_logprobs=recompute", "algorithm.correction=token"),
    "rejection": ("algorithm.old_logprobs=recompute", "algorithm.reject=seq_mean"),
    "sessions": ("algorithm.aggregate=session-mean",),
    "refilled groups": ("rollout.on_incomplete_group=refill", "algorithm.filter_max_rounds=3"),
}
# What only a mode without a critic has, and two ranks, for which some presets have no GPU.
COMPARED: dict[str, tuple[str, ...]] = {
    "greedy baseline": ("algorithm.advantage=remax",),
    "token baseline": ("algorithm.advantage=optimal_token_baseline", "algorithm.old_logprobs=recompute"),
    "two ranks": ("actor.ranks=2",),
    "steps of agents": ("algorithm.advantage=gigpo",),
    "credit for turns": ("algorithm.credit=turn",),
    "credit for trajectories": ("algorithm.credit=trajectory",),
}
# What only distillation has. The cases above change its policy loss, so it has one in all of them but the first.
TAUGHT: dict[str, tuple[str, ...]] = {
    "sampled tokens": ("distillation.loss=k3",),
    "policy gradient": ("distillation.loss=k1", "distillation.update=policy_gradient"),
    "corrected policy gradient": (
        *("distillation.loss=k1", "distillation.update=policy_gradient"),
        *("algorithm.old_logprobs=recompute", "algorithm.correction=token"),
    ),
    "sessions without rewards": ("algorithm.aggregate=session-mean",),
    "whole vocabulary": ("distillation.loss=reverse_kl",),
}


def has_trainer(preset: str) -> bool:
    module = dataflow.mode_named(compile_config(preset, environ={}).draft.mode).trainer.partition(":")[0]
    return find_spec(module) is not None


PRESETS = [each.name for each in list_presets({}) if not each.name.startswith("base-") and has_trainer(each.name)]


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=256 << 20)
    yield queue
    queue.close()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", OVERRIDES)
def test_roles_stages_and_columns_of_the_plan_are_those_of_the_run(queue: Queue, preset: str, case: str) -> None:
    overrides = [*OVERRIDES[case], "data.batch_size=8", "actor.mini_batch_size=8"]
    draft = compile_config(preset, environ={}).draft
    if facts.has_critic(draft):
        overrides.append("critic.mini_batch_size=8")
    if facts.has_teachers(draft) and OVERRIDES[case]:
        overrides += ["distillation.task_reward=true", "rollout.group_size=2"]
    check_plan(queue, preset, overrides)


@pytest.mark.parametrize("case", COMPARED)
def test_the_plan_of_compared_sessions_is_the_run(queue: Queue, case: str) -> None:
    check_plan(queue, "grpo-agent-tiny", [*COMPARED[case], "data.batch_size=8", "actor.mini_batch_size=8"])


@pytest.mark.parametrize("case", TAUGHT)
def test_the_plan_of_a_distillation_is_the_run(queue: Queue, case: str) -> None:
    overrides = [*TAUGHT[case], "data.batch_size=6", "actor.mini_batch_size=4"]  # padding, too
    check_plan(queue, "distill-tiny", overrides)


def check_plan(queue: Queue, preset: str, overrides: list[str]) -> None:
    run = fake_run(queue, preset, *overrides)
    metrics = run.trainer.step(max(1, run.config.critic.warmup_only_steps + 1))
    plan = make_plan(compile_config(preset, [], overrides, {}))
    ranks = {role.name: role.processes for role in plan.roles if role.name not in ("rollout", "storage")}
    assert ranks == run.roles
    assert [stage.name for stage in plan.stages] == [call for call in run.log.calls if call in run.log.reads]
    assert {stage.name: stage.reads for stage in plan.stages} == run.log.reads
    assert {stage.name: stage.writes for stage in plan.stages} == run.log.writes
    assert plan.multiple == metrics["padding/multiple"]
    assert plan.mini_batches["actor"] == metrics["actor/mini_batches"]
