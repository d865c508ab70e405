"""Real processes of a queue are killed: producers, storages, the index, nodes. No call hangs, and no row is partial."""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from faults.processes import SOON_S, index_of, lost_soon, process_of, storage_of, this_node

from tqppo.errors import DataLost, QueueError
from tqppo.queue.blocks.block import Block
from tqppo.queue.client import BatchMeta, Queue
from tqppo.queue.link import replies

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files
segments = importlib.import_module("tqppo_backends.storage.segments")

STORAGES = ["simple", "ray"]
LARGE = 400_000  # tokens: 3 MB, more than any storage treats as small


@ray.remote(num_cpus=0)
class Producer:
    """Puts rows, or kills itself in the middle of a put."""

    def put(self, queue: Queue, keys: list[str], tokens: int) -> BatchMeta:
        return queue.put(keys, {"tokens": [torch.ones(tokens, dtype=torch.int64) for _ in keys]})

    def put_at_once(self, queue: Queue, keys: list[str], tokens: int) -> None:
        """Put without a reservation, as if memory were not short."""
        queue.aio._spare = 1 << 40
        self.put(queue, keys, tokens)

    def die_before_publishing(self, queue: Queue) -> None:
        link = queue.aio.connection.link
        call = link.call

        async def deadly(method: str, *args: Any, timeout_s: float) -> Any:
            if method == "publish":
                os.kill(os.getpid(), signal.SIGKILL)
            return await call(method, *args, timeout_s=timeout_s)

        link.call = deadly  # type: ignore[method-assign]
        self.put(queue, ["ghost"], LARGE)

    def die_while_writing(self, queue: Queue) -> None:
        self.put(queue, ["before"], 10)
        write, copy, block = os.pwritev, segments._copy, replies.RayReply.block

        def half(handle: int, buffers: Any, position: int) -> int:
            write(handle, [buffers[0], buffers[1][:100]], position)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def half_copied(whole: Block, memory: Any) -> None:
            copy(dataclasses.replace(whole, pieces=whole.pieces[:2]), memory)
            os.kill(os.getpid(), signal.SIGKILL)

        def dies_before_the_answer(reply: replies.RayReply) -> Any:
            if reply.process.startswith("the storage"):  # the request is sent, the answer not yet read
                os.kill(os.getpid(), signal.SIGKILL)
            return block(reply)

        os.pwritev, replies.RayReply.block = half, dies_before_the_answer  # type: ignore[assignment,method-assign]
        segments._copy = half_copied
        self.put(queue, ["ghost"], LARGE)

    def die_while_writing_again(self, queue: Queue) -> None:
        """Die while writing to a file that the process has mapped."""
        for _ in range(2):
            queue.clear(self.put(queue, ["early"], LARGE))
        self.die_while_writing(queue)


@pytest.fixture(scope="module", params=STORAGES)
def queue(request: pytest.FixtureRequest, local_ray: None) -> Iterator[Queue]:
    """A queue that outlives its producers."""
    made = Queue.create(request.param, budget_bytes=64 << 20)
    yield made
    made.close()


def held_bytes(queue: Queue) -> int:
    """The bytes that the storage really holds, which may differ from the index."""
    if queue.storage == "simple":
        return sum(
            _size(file) for file in Path(f"/dev/shm/tqppo-queue-{queue.spec.run}-{this_node()[:12]}/live").iterdir()
        )
    return int(ray.get(storage_of(queue).__ray_call__.remote(_stored_bytes)))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # freed just now
        return 0


def _stored_bytes(keeper: Any) -> int:
    parts = [part for block in keeper._held.values() for part in block.parts]
    return sum(array.nbytes for part in parts for array in part.arrays or ray.get(part.ref))


# -- producers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["die_before_publishing", "die_while_writing", "die_while_writing_again"])
@pytest.mark.slow
def test_a_producer_that_dies_in_a_put_leaves_its_rows_and_no_ghosts(queue: Queue, death: str) -> None:
    producer = Producer.remote()  # type: ignore[attr-defined]
    batch = ray.get(producer.put.remote(queue, ["kept"], LARGE))
    before = queue.stats()["bytes"]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(getattr(producer, death).remote(queue))
    assert set(queue.list().keys) - {"before"} == {"kept"}
    assert queue.stats()["bytes"] <= before + 1000
    for _ in range(2):
        assert int(queue.get(batch, ["tokens"])["tokens"].values().sum()) == LARGE
    with pytest.raises(QueueError, match="ghost"):
        queue.get(BatchMeta("train", ("ghost",)), ["tokens"])
    queue.clear(queue.list())


@pytest.mark.slow
def test_bytes_that_a_dead_producer_never_published_come_back(queue: Queue) -> None:
    producer = Producer.remote()  # type: ignore[attr-defined]
    batch = ray.get(producer.put.remote(queue, ["kept"], 10))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(producer.die_before_publishing.remote(queue))
    assert held_bytes(queue) >= 8 * LARGE
    ray.get(index_of(queue).__ray_call__.remote(_lose_patience))
    deadline = time.monotonic() + 60
    while held_bytes(queue) >= 8 * LARGE and time.monotonic() < deadline:
        queue.list()  # it is at such calls that the index looks for leftovers
        time.sleep(0.2)
    assert held_bytes(queue) < 10_000  # what is published
    assert queue.get(batch, ["tokens"])["tokens"].values().tolist() == [1] * 10
    queue.clear(batch)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("waits_for", ["room", "publish"])
@pytest.mark.slow
def test_a_producer_that_dies_while_its_put_waits_is_not_waited_for(
    local_ray: None, storage: str, waits_for: str
) -> None:
    queue = Queue.create(storage, budget_bytes=8 << 20)
    full = queue.put(["full"], {"tokens": [torch.ones(900_000, dtype=torch.int64)]})
    producer = Producer.remote()  # type: ignore[attr-defined]
    ray.get(producer.put.remote(queue, ["early"], 10))
    process = process_of(producer)
    put = producer.put_at_once if waits_for == "publish" else producer.put
    waiting = put.remote(queue, ["ghost"], LARGE)
    while not queue.stats()["nodes"][this_node()]["waiting"]:
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    began = time.monotonic()
    queue.put(["small"], {"tokens": [torch.ones(10, dtype=torch.int64)]})
    assert time.monotonic() - began < SOON_S
    queue.clear(full)
    assert set(queue.list().keys) == {"early", "small"}
    queue.clear(queue.list())
    assert queue.stats()["bytes"] == 0
    queue.close()


def _lose_patience(index: Any) -> None:
    """Blocks count as left behind at once, not after minutes."""
    index._service._patience_s = 0.5


# -- storages and the index ------------------------------------------------------------------------------------------


def test_a_killed_storage_is_an_error_that_names_rows_columns_and_node(local_ray: None) -> None:
    queue = Queue.create("ray", budget_bytes=64 << 20)
    small = queue.put(["a_0_0", "b_0_0"], {"tokens": [torch.ones(10, dtype=torch.int64)] * 2})
    large = queue.put(["c_0_0"], {"tokens": [torch.ones(LARGE, dtype=torch.int64)]})
    os.kill(process_of(storage_of(queue)), signal.SIGKILL)
    lost_soon(lambda: queue.get(small, ["tokens"]), rf"tokens.*'a_0_0', 'b_0_0'.*{this_node()}", DataLost)
    lost_soon(lambda: queue.get(large, ["tokens"]), rf"tokens.*'c_0_0'.*{this_node()}", DataLost)
    lost_soon(lambda: queue.put(["d_0_0"], {"reward": torch.ones(1)}), rf"reward.*'d_0_0'.*{this_node()}", DataLost)
    queue.clear(queue.list())
    assert len(queue.list()) == 0
    queue.close()


@pytest.mark.parametrize("storage", STORAGES)
def test_without_its_index_every_call_fails_soon_and_closing_cleans_up(
    local_ray: None, storage: str, tmp_path: Path
) -> None:
    queue = Queue.create(storage, budget_bytes=64 << 20)
    batch = queue.put(["a_0_0"], {"reward": torch.ones(1)})
    queue.snapshot(tmp_path / "saved")
    waiting = _waiter(queue)
    os.kill(process_of(index_of(queue)), signal.SIGKILL)
    for work in (
        lambda: ray.get(waiting, timeout=SOON_S),
        lambda: queue.put(["b_0_0"], {"reward": torch.ones(1)}),
        lambda: queue.get(batch, ["reward"]),
        lambda: queue.tag({"a_0_0": {"n": 1}}),
        lambda: queue.list(),
        lambda: queue.wait(["never"]),
        lambda: queue.clear(batch),
        lambda: queue.stats(),
        lambda: queue.snapshot(tmp_path / "again"),
        lambda: queue.restore(tmp_path / "saved"),
        lambda: asyncio.run(queue.aio.get(batch, ["reward"])),
    ):
        lost_soon(work, "is gone|index died|is unresponsive")
    for about_rows in (
        lambda: queue.get(batch, ["reward"]),
        lambda: queue.tag({"a_0_0": {"n": 1}}),
        lambda: queue.wait(["a_0_0"]),
        lambda: queue.clear(batch),
    ):
        lost_soon(about_rows, rf"ran on node {this_node()}, and was asked about rows 'a_0_0' of partition 'train'")
    queue.close()
    assert glob.glob(f"/dev/shm/*{queue.spec.run}*") == []


def _waiter(queue: Queue) -> Any:
    """A call that waits at the index when the index dies."""

    @ray.remote(num_cpus=0)
    class Waiter:
        def ready(self) -> None:
            queue.stats()

        def wait(self) -> None:
            queue.wait(["never"], timeout_s=300)

    waiter = Waiter.remote()
    ray.get(waiter.ready.remote())
    waiting = waiter.wait.remote()
    time.sleep(0.3)
    return waiting


# -- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_share_a_queue_until_one_dies(storage: str) -> None:
    """In a process of its own, for a Ray cluster of its own."""
    script = Path(__file__).with_name("two_nodes.py")
    ended = subprocess.run([sys.executable, script, storage], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all is well" in ended.stdout
