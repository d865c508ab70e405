from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tqppo.dataflow import Features
from tqppo.devices.seats import Seat
from tqppo.errors import DeadlineExceeded, PreflightError, WorkerError
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.actor import Actor
from tqppo.workers.compute.worker import Worker
from tqppo.workers.critic import Critic
from tqppo.workers.process import bridge
from tqppo.workers.process.group import WorkerGroup, split
from tqppo.workers.specs import ModelSpec, PolicyLossSpec, RoleSpec


def batch_of(lengths: list[int], padding: int = 0) -> BatchMeta:
    tags = [{"seq_len": n} for n in lengths] + [{"seq_len": 2, "is_padding": True}] * padding
    return BatchMeta("train", tuple(f"p{i}_0_0" for i in range(len(tags))), tuple(tags), ("tokens",))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6])
def test_every_row_goes_to_one_rank(rows: int, ranks: int) -> None:
    batch = batch_of([7 * i + 3 for i in range(rows)])
    shards = split(batch, ranks)
    assert len(shards) == ranks
    assert sorted(key for shard in shards for key in shard.batch.keys) == sorted(batch.keys)


def test_ranks_that_compute_rows_together_are_given_the_same_ones() -> None:
    batch = batch_of([100, 100, 10, 10, 50, 50])
    group = WorkerGroup("actor", Actor, ranks=4, spec=RoleSpec(ModelSpec("model"), context_parallel=2))
    shards = group._shards(Actor.old_logprobs, batch, 1)
    assert shards[0] == shards[1]
    assert shards[2] == shards[3]
    assert [shards[0], shards[2]] == split(batch, 2)


def test_mini_batches_hold_the_same_rows_on_any_number_of_ranks() -> None:
    batch = batch_of([(13 * i) % 97 + 2 for i in range(21)], padding=3)
    contents = []
    for ranks in (1, 2, 4):
        shards = split(batch, ranks, num_mini_batches=2)
        minis: list[set[str]] = [set(), set()]
        for shard in shards:
            assert shard.sizes == [12 // ranks] * 2
            minis[0].update(shard.batch.keys[: shard.sizes[0]])
            minis[1].update(shard.batch.keys[shard.sizes[0] :])
        contents.append(minis)
    assert contents[0] == contents[1] == contents[2]


def test_padding_is_spread_over_mini_batches_and_work_over_ranks() -> None:
    batch = batch_of([100, 100, 100, 100, 10, 10, 10, 10, 10, 10], padding=2)
    for shard in split(batch, 2, num_mini_batches=2):
        work = [batch.tags[place]["seq_len"] for place in shard.places]
        assert sorted(work)[-2:] == [100, 100]
    first, second = split(batch, 1, num_mini_batches=2)[0].places[:6], split(batch, 1, num_mini_batches=2)[0].places[6:]
    assert sum(place >= 10 for place in first) == sum(place >= 10 for place in second) == 1


@pytest.mark.parametrize(
    ("real", "mini", "ranks"), [(361, 120, 2), (371, 120, 2), (400, 120, 2), (1030, 256, 8), (7, 4, 2)]
)
def test_real_rows_per_mini_batch_differ_by_at_most_one_on_any_number_of_ranks(
    real: int, mini: int, ranks: int
) -> None:
    """verl gives 120, 120, 120 and 1 real rows in the first case: a whole optimizer step from one row."""
    batch = batch_of([(37 * i) % 7800 + 200 for i in range(real)], padding=-real % mini)
    shards = split(batch, ranks, num_mini_batches=len(batch) // mini)
    counts = [0] * (len(batch) // mini)
    for shard in shards:
        begin = 0
        for number, size in enumerate(shard.sizes):
            part = shard.places[begin : begin + size]
            begin += size
            assert size == mini // ranks
            assert any(place < real for place in part), "a rank would have nothing but padding"
            counts[number] += sum(place < real for place in part)
    assert sum(counts) == real
    assert max(counts) - min(counts) <= 1


def test_what_a_rank_is_sent_is_small(spec: RoleSpec) -> None:
    assert len(pickle.dumps(spec)) < 64 * 1024


class Clumsy(Worker):
    """Fails in the ways that workers fail."""

    def start(self) -> None:
        pass

    def rank(self) -> int:
        return self.ranks.rank

    def raise_on_rank_1(self) -> None:
        if self.ranks.rank == 1:
            raise ValueError("rank one is unwell")
        time.sleep(600)

    def die_on_rank_1(self) -> None:
        if self.ranks.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(600)

    def complain(self) -> None:
        raise PreflightError("no peft here")

    def sleep(self) -> None:
        time.sleep(600)


@contextmanager
def running(role: str, worker: type[Worker], ranks: int, spec: RoleSpec, queue: Any = None) -> Iterator[WorkerGroup]:
    group = WorkerGroup(role, worker, ranks=ranks, spec=spec, queue=queue, seats=[Seat(cpus=0.1)] * ranks)
    group.start(RayLauncher())
    try:
        group.ready(120.0)
        yield group
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_failing_rank_is_named_with_its_traceback_at_once(spec: RoleSpec) -> None:
    with running("critic", Clumsy, 2, spec) as group:
        assert group.call(Clumsy.rank) == 0
        with pytest.raises(WorkerError) as error:
            group.call(Clumsy.raise_on_rank_1)
    assert "critic rank 1 failed in raise_on_rank_1" in str(error.value)
    assert "rank one is unwell" in str(error.value)
    assert "Traceback" in str(error.value) or "line" in str(error.value)
    with pytest.raises(WorkerError, match="not running"):
        group.call(Clumsy.rank)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_dead_rank_is_named(spec: RoleSpec) -> None:
    with running("actor", Clumsy, 2, spec) as group, pytest.raises(WorkerError, match="actor rank 1"):
        group.call(Clumsy.die_on_rank_1)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_silence_ends_at_the_deadline_and_errors_of_ours_keep_their_class(spec: RoleSpec) -> None:
    silence = pytest.raises(DeadlineExceeded, match=r"actor\.sleep: no answer from rank 0 within 1 s")
    with running("actor", Clumsy, 1, replace(spec, timeout_s=1.0)) as group, silence:
        group.call(Clumsy.sleep)
    with running("actor", Clumsy, 1, spec) as group, pytest.raises(PreflightError, match="actor rank 0: no peft here"):
        group.call(Clumsy.complain)


def put_rows(queue: Queue, rows: dict[str, Any]) -> BatchMeta:
    from tqppo.algorithms.padding import padding_rows

    tags = [{"seq_len": len(tokens), "order": i} for i, tokens in enumerate(rows["tokens"].unbind())]
    real = queue.put([f"p{i}_0_0" for i in range(8)], rows, tags=tags)
    padding = padding_rows(4, dict.fromkeys(rows, ()))
    return BatchMeta.join([real, queue.put(padding.keys, padding.columns, tags=padding.tags)])


def alone(worker: type[Worker], spec: RoleSpec, queue: Queue) -> Any:
    """A single rank, in this process."""
    made = worker(spec, queue=queue)
    made.start()
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_two_actor_ranks_do_what_one_does(spec: RoleSpec, rows: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities, updates, weights; and checkpoints, which continue on two to the bit and on one closely."""
    loss = PolicyLossSpec(aggregate="seq-mean-token-mean", kl="k3", kl_coef=0.05, entropy_coef=0.01)
    spec = replace(spec, policy_loss=loss, features=Features(kl_in_loss=True), publish_dir=str(tmp_path / "weights"))
    queue = Queue.create(budget_bytes=64 << 20)
    batch = put_rows(queue, rows)
    one = alone(Actor, replace(spec, publish_dir=""), queue)
    bridge.run_columns(one, Actor.old_logprobs, batch)
    expected = queue.get(batch, ["old_logprobs"])
    with running("actor", Actor, 2, spec, queue) as two:
        extended = two.add_columns(Actor.old_logprobs, batch)
        assert (extended.keys, extended.tags) == (batch.keys, batch.tags)
        for name, column in queue.get(extended, ["old_logprobs"]).items():
            torch.testing.assert_close(column.values(), expected[name].values(), atol=1e-5, rtol=1e-5)
        one_metrics = update(one, in_mini_batches(extended), step=1, sizes=[6, 6])
        two_metrics = two.update(Actor.update, extended, step=1, num_mini_batches=2)
        assert two_metrics == pytest.approx(one_metrics, abs=1e-5)
        published = load_file(Path(two.call(Actor.publish, 1).folder, "model.safetensors"))
        assert_close(published, load_file(Path(alone_published(one), "model.safetensors")), 1e-5)
        two.call(Actor.save, str(tmp_path / "two"))
        one.save(str(tmp_path / "one"))
        from saved_parts import all_parts  # not at the top: processes of Ray import this module, and have no such path

        moments = [all_parts(tmp_path / name, "optimizer") for name in ("one", "two")]
        assert_close(*moments, 1e-6)
        next_step = two.update(Actor.update, extended, step=2)
        two.call(Actor.load, str(tmp_path / "two"))
        assert two.update(Actor.update, extended, step=2) == next_step
    one.load(str(tmp_path / "two"))
    assert update(one, extended, step=2) == pytest.approx(next_step, abs=1e-5)
    one.close()
    queue.close()


def update(worker: Any, batch: BatchMeta, **named: Any) -> dict[str, float]:
    return bridge.run_update(worker, type(worker).update, batch, **named)


def in_mini_batches(batch: BatchMeta) -> BatchMeta:
    """The rows in the order that a group would give them to a single rank."""
    (shard,) = split(batch, 1, num_mini_batches=2)
    return shard.batch


def alone_published(actor: Actor) -> str:
    return actor.publish(2).folder


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=tolerance, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_two_critic_ranks_do_what_one_does_even_with_rows_for_one_only(spec: RoleSpec, rows: dict[str, Any]) -> None:
    queue = Queue.create(budget_bytes=64 << 20)
    batch = put_rows(queue, rows)
    one = alone(Critic, spec, queue)
    with running("critic", Critic, 2, spec, queue) as two:
        for step, part in enumerate((batch, batch.take([3]), batch), start=1):
            assert two.update(Critic.update, part, step=step) == pytest.approx(update(one, part, step=step), abs=1e-5)
        values = queue.get(two.add_columns(Critic.values, batch.take([6])), ["values"])["values"].values()
    torch.testing.assert_close(
        values, one.values(queue.get(batch.take([6]), ["tokens", "response_mask"]))["values"].values()
    )
    queue.close()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_bfloat16_computes_small_and_keeps_float32_parameters(
    spec: RoleSpec, rows: dict[str, Any], tmp_path: Path
) -> None:
    queue = Queue.create(budget_bytes=64 << 20)
    batch = put_rows(queue, rows)
    small = replace(spec, model=replace(spec.model, dtype="bfloat16"), publish_dir=str(tmp_path / "weights"))
    with running("actor", Actor, 1, small, queue) as actor:
        before = queue.get(batch, ["old_logprobs"])["old_logprobs"].values().clone()
        logprobs = queue.get(actor.add_columns(Actor.old_logprobs, batch), ["old_logprobs"])["old_logprobs"].values()
        assert logprobs.dtype == before.dtype == torch.float32
        assert actor.update(Actor.update, batch, step=1)["actor/updates"] == 1
        actor.call(Actor.save, str(tmp_path / "saved"))
        published = load_file(Path(actor.call(Actor.publish, 1).folder, "model.safetensors"))
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float32}
    queue.close()
