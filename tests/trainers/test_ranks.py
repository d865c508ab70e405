"""Actor and critic on two and four ranks do what one rank does, with sessions of several trajectories and padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_parts import all_parts
from trainers.batches import Bench, RandomRow, Variant, random_rows

from tqppo.dataflow import Features
from tqppo.devices.seats import Seat
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.process.bridge import run_columns, run_update
from tqppo.workers.process.group import WorkerGroup, split
from tqppo.workers.specs import ModelSpec, OptimizerSpec, PolicyLossSpec, RoleSpec, ValueLossSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]
FEATURES = Features(has_critic=True, uses_values=True, has_session_weights=True)
ROLES = {"actor": Actor, "critic": Critic}


@dataclass
class Alone:
    """One rank in this process, called as a group is."""

    worker: Any

    def call(self, method: Any, *arguments: Any) -> Any:
        return method(self.worker, *arguments)

    def add_columns(self, method: Any, batch: BatchMeta) -> BatchMeta:
        return batch.with_columns(*run_columns(self.worker, method, batch))

    def update(self, method: Any, batch: BatchMeta, *, step: int, num_mini_batches: int) -> Metrics:
        (shard,) = split(batch, 1, num_mini_batches=num_mini_batches)
        return run_update(self.worker, method, shard.batch, step=step, sizes=shard.sizes)


def role_spec(model: Path, budget: int) -> RoleSpec:
    return RoleSpec(
        ModelSpec(str(model)),
        features=FEATURES,
        optimizer=OptimizerSpec(lr=1e-3, total_steps=10),
        policy_loss=PolicyLossSpec(aggregate="session-mean", entropy_coef=0.01),
        value_loss=ValueLossSpec(aggregate="seq-mean-token-mean"),
        micro_batch_tokens=budget,
    )


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create(budget_bytes=64 << 20)
    yield queue
    queue.close()


def one_step(bench: Bench, groups: dict[str, Any], rows: list[RandomRow], multiple: int, folder: Path) -> Metrics:
    """The stages of a PPO step over these rows, from the same weights every time; moments end up in `folder`."""
    for role, group in groups.items():
        group.call(ROLES[role].load, str(folder.parent / "start" / role))
    batch = bench.batch(rows, Variant(multiple=multiple))
    groups["actor"].add_columns(Actor.old_logprobs, batch)
    groups["critic"].add_columns(Critic.values, batch)
    metrics = bench.estimate(batch)
    for role, group in groups.items():
        metrics |= group.update(ROLES[role].update, batch, step=1, num_mini_batches=2)
        group.call(ROLES[role].save, str(folder / role))
    bench.queue.clear(batch)
    assert not len(bench.queue.list())
    return {name: value for name, value in metrics.items() if not name.startswith("padding/")}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_padding_and_token_budgets_change_neither_metrics_nor_gradients(
    queue: Queue, tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    bench, spec = Bench(queue, str(tiny_model), FEATURES), role_spec(tiny_model, 100_000)
    alone: dict[str, Any] = {}
    for role, kind in ROLES.items():
        alone[role] = Alone(kind(spec, queue=queue))
        alone[role].worker.start()
        alone[role].call(kind.save, str(tmp_path / "start" / role))
    with ExitStack() as stack:
        groups: dict[str, Any] = {}
        for role, kind in ROLES.items():
            small, seats = replace(spec, micro_batch_tokens=24), [Seat(cpus=0.1)] * ranks
            groups[role] = WorkerGroup(role, kind, ranks=ranks, spec=small, queue=queue, seats=seats)
            stack.callback(groups[role].close)
            groups[role].start(RayLauncher())
        for group in groups.values():
            group.ready(240.0)
        for seed in (1, 2, 5):
            rows = random_rows(seed)
            expected = one_step(bench, alone, rows, 2, tmp_path / "one")
            assert one_step(bench, groups, rows, 8 * ranks, tmp_path / "many") == pytest.approx(
                expected, rel=1e-4, abs=1e-5
            )
            for role in ROLES:
                moments = [all_parts(tmp_path / name / role, "optimizer") for name in ("one", "many")]
                for name, moment in moments[0].items():
                    torch.testing.assert_close(moments[1][name], moment, rtol=1e-3, atol=1e-6)
