"""Two Ray nodes on this machine, with object stores of their own: `python two_nodes.py STORAGE`."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tqppo.columns import Column, Kind, declare
from tqppo.errors import DataLost
from tqppo.queue.client import BatchMeta, Queue
from tqppo.queue.link.replies import NOT_YET, RayReply

NAMES = ["tokens", "reward", "far_image", "far_json"]
MIB = 1 << 20


@ray.remote(num_cpus=0)
class Worker:
    def put(self, queue: Queue, keys: list[str]) -> BatchMeta:
        return queue.put(keys, columns(len(keys)))

    def check(self, queue: Queue, batch: BatchMeta) -> None:
        check(queue, batch)

    def give_up(self, queue: Queue) -> None:
        """Cancel a wait and a put over budget."""

        async def work() -> None:
            image = torch.zeros(1, 15 * MIB)
            calls = [queue.aio.wait(["never"]), queue.aio.put(["ghost"], {"far_image": image})]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(1)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        full = queue.put(["full"], {"far_image": torch.zeros(1, 8 * MIB)})
        asyncio.run(work())
        queue.put(["small"], {"reward": torch.ones(1)}, timeout_s=10)  # is not delayed by them
        queue.clear(full)
        assert queue.list().keys == ("small",)
        queue.clear(queue.list())

    def append(self, queue: Queue, batch: BatchMeta) -> BatchMeta:
        return queue.put(batch, {"values": [torch.full((i,), float(i)) for i in range(len(batch))]})


def columns(count: int) -> dict[str, Any]:
    return {
        "tokens": [torch.arange(i) for i in range(count)],
        "reward": torch.arange(float(count)),
        "far_image": torch.arange(count * 300_000, dtype=torch.float32).view(count, 300_000),
        "far_json": [{"place": i} for i in range(count)],
    }


def check(queue: Queue, batch: BatchMeta) -> None:
    found, expected = queue.get(batch, NAMES), columns(len(batch))
    assert [row.tolist() for row in found["tokens"].unbind()] == [row.tolist() for row in expected["tokens"]]
    assert torch.equal(found["far_image"], expected["far_image"])
    assert torch.equal(found["reward"], expected["reward"])
    assert found["far_json"] == expected["far_json"]
    found["far_image"] += 1  # callers may change results


def shared(queue: Queue, worker: Any) -> BatchMeta:
    """Rows of both nodes, read on both, together, extended and cleared in part."""
    there = ray.get(worker.put.remote(queue, ["there0", "there1", "there2"]))
    here = queue.put(["here0", "here1"], columns(2))
    for batch in (here, there):
        check(queue, batch)
        ray.get(worker.check.remote(queue, batch))
    both = BatchMeta.join([here, there])
    assert queue.get(both, ["reward"])["reward"].tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]
    ray.get(worker.append.remote(queue, both))
    assert queue.get(both.take([4, 0]), ["values"])["values"].values().tolist() == [4.0] * 4
    used = {node: held["bytes"] for node, held in queue.stats()["nodes"].items()}
    assert len(used) == 2, used
    assert min(used.values()) > 2 * MIB, used
    queue.clear(both.take([0, 1, 2, 3]))
    assert queue.get(there.take([2]), ["far_json", "reward"])["far_json"] == [{"place": 2}]
    assert queue.stats()["bytes"] < 2 * MIB
    queue.clear(there.take([2]))
    assert queue.stats()["bytes"] == 0
    return ray.get(worker.put.remote(queue, ["there0", "there1"]))


def only_rows(queue: Queue, worker: Any) -> None:
    """A reader of a few rows on the other node is sent little more than these rows."""
    there = ray.get(worker.put.remote(queue, [f"there{i}" for i in range(12)]))
    expected = columns(12)
    for places in ([7], [2, 3, 4], [11, 0, 5]):
        with arriving() as sizes:
            found = queue.get(there.take(places), ["far_image", "reward"])
        assert torch.equal(found["far_image"], expected["far_image"][places])
        assert found["reward"].tolist() == [float(i) for i in places]
        asked = len(places) * (300_000 * 4 + 4)
        assert asked <= sum(sizes) <= 1.1 * asked, (places, asked, sizes)
    queue.clear(there)


@contextmanager
def arriving() -> Iterator[list[int]]:
    """Collect the sizes of all answers of Ray actors that this process waits for."""
    sizes: list[int] = []
    attempt = RayReply._attempt

    def measured(reply: RayReply[Any], seconds: float) -> Any:
        answer = attempt(reply, seconds)
        sizes.append(0 if answer is NOT_YET else len(pickle.dumps(answer)))
        return answer

    RayReply._attempt = measured  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        RayReply._attempt = attempt  # type: ignore[method-assign]


def outlive(queue: Queue, worker: Any) -> None:
    """Fetch rows of a dead producer to the other node, several times because Ray cleans up after it gradually."""
    batches = [ray.get(worker.put.remote(queue, [f"{i}there0", f"{i}there1"])) for i in range(3)]
    ray.kill(worker)
    for batch in batches:
        check(queue, batch)
        time.sleep(1)
    queue.clear(BatchMeta.join(batches))


def lost(queue: Queue, batch: BatchMeta, node: str) -> None:
    began = time.monotonic()
    try:
        queue.get(batch, ["reward", "far_image"])
    except DataLost as error:
        took, message = time.monotonic() - began, str(error)
    else:
        raise AssertionError("rows of a dead storage were read")
    assert took < 5, f"{took} s: {message}"
    for name in ("reward", "far_image", "there0", "there1", node):
        assert name in message, message
    print(f"after {took:.2f} s: {message}")


def main() -> None:
    declare(Column("far_image", Kind.ROW, "float32", trailing=(None,)))
    declare(Column("far_json", Kind.JSON))
    arguments = {"num_cpus": 2, "object_store_memory": 200 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    second = cluster.add_node(**arguments)
    ray.init(address=cluster.address, log_to_driver=False)
    me = ray.get_runtime_context().get_node_id()
    (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != me)
    strategy = NodeAffinitySchedulingStrategy(other, soft=False)
    worker, mortal = (Worker.options(scheduling_strategy=strategy).remote() for _ in range(2))  # type: ignore[attr-defined]
    queue = Queue.create(sys.argv[1], budget_bytes=64 * MIB)
    outlive(queue, mortal)
    ray.get(worker.give_up.remote(queue))
    only_rows(queue, worker)
    batch = shared(queue, worker)
    storage = ray.get_actor(f"tqppo-{queue.spec.run}-storage-{other[:16]}")
    process = ray.get(storage.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(process, signal.SIGSTOP)  # silent
    lost(queue, batch, other)
    os.kill(process, signal.SIGCONT)
    check(queue, batch)
    os.kill(process, signal.SIGKILL)
    lost(queue, batch, other)
    queue.clear(batch)
    here = queue.put(["here0"], columns(1))
    check(queue, here)  # this node is not affected
    queue.close()

    queue = Queue.create(sys.argv[1], budget_bytes=64 * MIB)
    batch = ray.get(worker.put.remote(queue, ["there0", "there1"]))
    cluster.remove_node(second, allow_graceful=False)
    lost(queue, batch, other)
    queue.close()
    ray.shutdown()
    cluster.shutdown()
    print("all is well")


if __name__ == "__main__":
    main()
