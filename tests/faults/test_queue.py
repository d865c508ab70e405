"""Real processes killed under the queue: producers, storages, the index, nodes. Nothing hangs or is half there."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tqppo.errors import QueueError
from tqppo.queue import calls
from tqppo.queue.client import BatchMeta, Queue

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files

SOON_S = 5.0
STORAGES = ["simple", "ray"]
LARGE = 400_000  # tokens: 3 MB, more than a storage keeps in a corner


@ray.remote(num_cpus=0)
class Producer:
    """Puts rows; told to, it dies by SIGKILL in the middle of a put."""

    def put(self, queue: Queue, keys: list[str], tokens: int) -> BatchMeta:
        return queue.put(keys, {"tokens": [torch.ones(tokens, dtype=torch.int64) for _ in keys]})

    def die_before_publishing(self, queue: Queue) -> None:
        ask = queue._ask

        async def deadly(method: str, *args: Any, **more: Any) -> Any:
            if method == "publish":
                os.kill(os.getpid(), signal.SIGKILL)
            return await ask(method, *args, **more)

        queue._ask = deadly  # type: ignore[method-assign]
        self.put(queue, ["ghost"], LARGE)

    def die_while_writing(self, queue: Queue) -> None:
        self.put(queue, ["before"], 10)
        write, block = os.pwritev, calls.Remote.block

        def half(handle: int, buffers: Any, position: int) -> int:
            write(handle, [buffers[0], buffers[1][:100]], position)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def unheard(reply: calls.Remote) -> Any:
            if reply.who.startswith("the storage"):  # asked, but the answer finds nobody
                os.kill(os.getpid(), signal.SIGKILL)
            return block(reply)

        os.pwritev, calls.Remote.block = half, unheard  # type: ignore[assignment,method-assign]
        self.put(queue, ["ghost"], LARGE)


@pytest.fixture(params=STORAGES)
def queue(request: pytest.FixtureRequest, local_ray: None) -> Iterator[Queue]:
    made = Queue.create(request.param, budget_bytes=64 << 20, timeout_s=20)
    yield made
    made.close()
    assert glob.glob(f"/dev/shm/*{made.spec.run}*") == []


def actors(queue: Queue, kind: str) -> list[Any]:
    return [ray.get_actor(name) for name in ray.util.list_named_actors() if f"{queue.spec.run}-{kind}" in name]


def lost_soon(work: Callable[[], Any], match: str) -> None:
    began = time.monotonic()
    with pytest.raises(QueueError, match=match):
        work()
    assert time.monotonic() - began < SOON_S


def held_bytes(queue: Queue) -> int:
    """What the storage really holds, whatever the index says."""
    if queue.storage == "simple":
        files = Path(f"/dev/shm/tqppo-{queue.spec.run}-{ray.get_runtime_context().get_node_id()[:12]}/live").iterdir()
        return sum(file.stat().st_size for file in files)
    (keeper,) = actors(queue, "storage")
    return int(ray.get(keeper.__ray_call__.remote(_kept_bytes)))


def _kept_bytes(keeper: Any) -> int:
    objects = [array for refs in keeper._refs.values() for group in ray.get(refs) for array in group]
    return sum(array.nbytes for array in [*objects, *(a for arrays in keeper._small.values() for a in arrays)])


def process_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


# -- producers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["die_before_publishing", "die_while_writing"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.slow
def test_a_producer_that_dies_in_a_put_leaves_its_rows_and_no_ghosts(local_ray: None, storage: str, death: str) -> None:
    queue = Queue.create(storage, budget_bytes=64 << 20, timeout_s=10)
    producer = Producer.remote()  # type: ignore[attr-defined]
    batch = ray.get(producer.put.remote(queue, ["kept"], LARGE))
    before = queue.stats()["bytes"]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(getattr(producer, death).remote(queue))
    assert set(queue.list().keys) - {"before"} == {"kept"}
    assert queue.stats()["bytes"] <= before + 1000
    assert int(queue.get(batch, ["tokens"])["tokens"].values().sum()) == LARGE
    with pytest.raises(QueueError, match="ghost"):
        queue.get(BatchMeta("train", ("ghost",)), ["tokens"])
    queue.close()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.slow
def test_bytes_that_a_dead_producer_never_published_come_back(local_ray: None, storage: str) -> None:
    queue = Queue.create(storage, budget_bytes=64 << 20, timeout_s=2)  # swept after twice that and the grace
    producer = Producer.remote()  # type: ignore[attr-defined]
    batch = ray.get(producer.put.remote(queue, ["kept"], 10))
    kept = held_bytes(queue)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(producer.die_before_publishing.remote(queue))
    assert held_bytes(queue) > kept + 8 * LARGE
    deadline = time.monotonic() + 60
    while held_bytes(queue) > kept and time.monotonic() < deadline:
        queue.list()  # it is at such calls that the index looks for leftovers
        time.sleep(0.5)
    assert held_bytes(queue) == kept
    assert queue.get(batch, ["tokens"])["tokens"].values().tolist() == [1] * 10
    queue.close()


# -- storages and the index ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [10, LARGE])
def test_a_killed_storage_is_an_error_that_names_rows_columns_and_node(local_ray: None, tokens: int) -> None:
    queue = Queue.create("ray", budget_bytes=64 << 20, timeout_s=20)
    batch = queue.put(["a_0_0", "b_0_0"], {"tokens": [torch.ones(tokens, dtype=torch.int64)] * 2})
    (keeper,) = actors(queue, "storage")
    os.kill(process_of(keeper), signal.SIGKILL)
    node = ray.get_runtime_context().get_node_id()

    def read_on() -> None:  # until Ray has heard of the death, the object store may still have the bytes
        while time.monotonic() - began < SOON_S:
            assert queue.get(batch, ["tokens"])["tokens"].values().tolist() == [1] * 2 * tokens

    began = time.monotonic()
    lost_soon(read_on, rf"tokens.*'a_0_0', 'b_0_0'.*{node}")
    lost_soon(lambda: queue.put(["c_0_0"], {"reward": torch.ones(1)}), node)
    queue.clear(batch)
    assert len(queue.list()) == 0
    queue.close()


@pytest.mark.slow
def test_a_storage_that_is_silent_is_an_error_at_the_deadline(local_ray: None) -> None:
    queue = Queue.create("ray", budget_bytes=64 << 20, timeout_s=3)
    batch = queue.put(["a_0_0"], {"tokens": [torch.ones(10, dtype=torch.int64)]})
    (keeper,) = actors(queue, "storage")
    pid = process_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    try:
        lost_soon(lambda: queue.get(batch, ["tokens"]), r"'a_0_0'.*did not answer within 3 s")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert queue.get(batch, ["tokens"])["tokens"].values().tolist() == [1] * 10
    queue.close()


def test_without_its_index_every_call_fails_soon_and_closing_cleans_up(queue: Queue, tmp_path: Path) -> None:
    batch = queue.put(["a_0_0"], {"reward": torch.ones(1)})
    queue.snapshot(tmp_path / "saved")
    waiting = _waiter(queue)
    (index,) = actors(queue, "index")
    os.kill(process_of(index), signal.SIGKILL)
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
        lambda: asyncio.run(queue.aget(batch, ["reward"])),
    ):
        lost_soon(work, "is gone|index died")


def _waiter(queue: Queue) -> Any:
    """A call that is blocked at the index when it dies."""

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
@pytest.mark.slow
def test_two_nodes_share_a_queue_until_one_dies(storage: str) -> None:
    """In a process of its own, for a Ray cluster of its own."""
    script = Path(__file__).with_name("two_nodes.py")
    ended = subprocess.run([sys.executable, script, storage], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all is well" in ended.stdout
