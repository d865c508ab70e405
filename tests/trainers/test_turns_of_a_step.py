"""Who is on the GPUs during a step, a validation and after a failure; what is there fits on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from trainers.fakes import FakeEngines, Memory, fake_run

from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of
from tqppo.config.plan.memory import total
from tqppo.config.plan.plan import make_plan
from tqppo.devices.memory import MemoryLedger
from tqppo.errors import EngineError, OutOfDeviceMemory
from tqppo.queue.client import Queue
from tqppo.rollout.teachers.figures import RolloutReport

GIB = 2**30
SMALL = ("data.batch_size=8", "actor.mini_batch_size=8", "rollout.group_size=2", "critic.mini_batch_size=8")
WIDE = ("cluster.colocate=false", "cluster.nodes=4", "rollout.replicas=4")


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


def settings(preset: str, *more: str) -> list[str]:
    critic = preset.startswith("ppo")
    return [each for each in (*SMALL, *more) if critic or not each.startswith("critic.")]


def planned(preset: str, *overrides: str, engine: str = "vllm") -> Memory:
    """80 GiB, the plan's sizes of the roles, and an engine that takes its share or only what it needs."""
    plan = make_plan(compile_config(preset, [], list(overrides), {}))
    roles = {role.name: int(total(role.memory)) for role in plan.roles}
    weights = roles["rollout"] // 2
    return Memory(80 * GIB, roles, (weights, 40 * GIB - weights) if engine == "vllm" else (weights, weights))


def test_engines_sleep_while_the_trainer_computes_and_get_weights_before_their_cache(queue: Queue) -> None:
    overrides = settings("grpo-7b")
    run = fake_run(queue, "grpo-7b", *overrides, memory=planned("grpo-7b", *overrides))
    assert run.log.turns == ["actor rests", "reference rests"]  # trainers have started, engines not yet
    run.log.turns.clear()
    run.trainer.step(1)
    run.trainer.step(2)
    step = [
        "rollout.generate",
        *("engines sleep", "actor resumes", "actor.old_logprobs"),
        *("actor rests", "reference resumes", "reference.logprobs"),
        *("reference rests", "actor resumes", "actor.update", "actor.publish"),
    ]
    found = [each for each in run.log.turns if each != "actor.probe"]
    assert found[: len(step) + 3] == [*step, "actor rests", "engines wake with weights", "load version 1"]
    assert found[len(step) + 3 : len(step) + 5] == ["engines wake", "rollout.generate"]


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
@pytest.mark.parametrize("placed", [(), WIDE], ids=["colocated", "separate"])
@pytest.mark.parametrize("preset", ["grpo-7b", "ppo-7b", "distill-7b"])
def test_the_sum_on_every_gpu_stays_under_its_memory(
    queue: Queue, preset: str, placed: tuple[str, ...], engine: str
) -> None:
    overrides = settings(preset, *placed)
    run = fake_run(queue, preset, *overrides, memory=planned(preset, *overrides, engine=engine))
    run.log.turns.clear()
    for step in (1, 20):  # with and without an update of the actor
        run.trainer.step(step)
    assert run.turns.ledger is not None
    assert 0 < max(run.turns.ledger.most.values()) <= 80 * GIB
    leaves = [each for each in run.log.turns if each.endswith(("rests", "resumes", "sleep", "wake"))]
    assert bool(leaves) == (not placed)


def test_without_turns_the_same_run_would_not_fit() -> None:
    overrides = settings("ppo-7b")
    memory = planned("ppo-7b", *overrides)
    ledger = MemoryLedger(placement_of(compile_config("ppo-7b", [], overrides, {}).draft), memory.device)
    with pytest.raises(OutOfDeviceMemory, match=r"GPU 0 of node 0 has no room: .*rollout 40.0 GiB"):
        hold_all(ledger, memory)


def hold_all(ledger: MemoryLedger, memory: Memory) -> None:
    for role in ("actor", "critic", "reference"):
        ledger.write(role, memory.roles[role])
    ledger.write("rollout", sum(memory.engine))


class FailingEngines(FakeEngines):
    """Engines that fail once."""

    has_failed = False

    def generate(self, prompts: Sequence[Any], task: Any) -> RolloutReport:
        if not self.has_failed:
            self.has_failed = True
            self.shared_engines.be_awake()
            raise EngineError("out of luck")
        return super().generate(prompts, task)


def test_after_a_failure_the_next_call_finds_the_devices_free(queue: Queue) -> None:
    overrides = settings("grpo-7b")
    memory = planned("grpo-7b", *overrides)
    run = fake_run(queue, "grpo-7b", *overrides, engines=FailingEngines, memory=memory)
    with pytest.raises(EngineError):
        run.trainer.step(1)
    run.stages.actor.publish(0)  # what saving a checkpoint does: the actor is called between two steps
    assert run.log.turns[-3:] == ["engines sleep", "actor resumes", "actor.publish"]
    run.trainer.step(1)
    assert run.log.turns[-1] == "load version 1"


def test_a_validation_between_two_steps_takes_its_turn(queue: Queue) -> None:
    overrides = settings("grpo-7b")
    run = fake_run(queue, "grpo-7b", *overrides, memory=planned("grpo-7b", *overrides))
    run.trainer.step(1)
    run.stages.actor.publish(1)
    run.log.turns.clear()
    run.stages.rollout.engines.generate([], None)  # type: ignore[arg-type]
    assert run.log.turns == ["actor rests", "engines wake", "rollout.generate"]
