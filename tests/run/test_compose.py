"""The settings that each stage gets from a config."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainers.fakes import fake_run

from tqppo.queue.client import Queue
from tqppo.run import compose
from tqppo.trainers.grpo import GrpoTrainer
from tqppo.trainers.ppo import PpoTrainer


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=16 << 20)
    yield queue
    queue.close()


@pytest.mark.parametrize(("mode", "trainer"), [("grpo", GrpoTrainer), ("ppo", PpoTrainer)])
def test_each_mode_has_its_trainer(queue: Queue, mode: str, trainer: type) -> None:
    assert isinstance(fake_run(queue, None, f"mode={mode}").trainer, trainer)


def test_engines_with_arithmetic_of_their_own_are_probed_and_the_embedded_one_is_not(queue: Queue) -> None:
    assert fake_run(queue, None).stages.rollout.probe() is None
    probe = fake_run(queue, None, "rollout.backend=vllm", "run.deterministic=false").stages.rollout.probe()
    assert probe is not None
    assert len(probe.tokens) == compose.PROBE_TOKENS
    assert max(probe.tokens) < 256


def test_mini_batches_count_sessions(queue: Queue) -> None:
    run = fake_run(queue, None, "mode=ppo", "data.batch_size=8", "rollout.group_size=4", "critic.mini_batch_size=2")
    assert run.stages.actor.mini_batch_rows == 0
    assert run.stages.critic is not None
    assert run.stages.critic.mini_batch_rows == 8
    assert run.stages.padding.multiple == 8


def test_beta_is_fixed_unless_the_controller_is_adaptive(queue: Queue) -> None:
    kl = ("algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.2")
    fixed = compose.kl_controller(fake_run(queue, None, *kl).config)
    assert fixed.after(5.0, 100).coef == 0.2
    adaptive = compose.kl_controller(fake_run(queue, None, *kl, "algorithm.kl_controller=adaptive").config)
    assert adaptive.after(5.0, 100).coef > 0.2


def test_validation_samples_more_and_keeps_no_tensors(queue: Queue) -> None:
    config = fake_run(queue, None, "validation.samples=3", "validation.temperature=0.7").config
    task = compose.validation_task(config)
    assert (task.partition, task.group_size, task.sampling.temperature) == ("val", 3, 0.7)
    assert task.greedy
    assert not task.keep_tensors
