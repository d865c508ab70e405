"""Storage actors, one per node, and the storages that use them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import ray

from tqppo.errors import BackendError, DataLost, DeadlineExceeded
from tqppo.processes.ray_calls import this_node
from tqppo.queue.link.calls import run
from tqppo.queue.storage import StorageSpec

nodes = importlib.import_module("tqppo_backends.storage.nodes")
ray_store = importlib.import_module("tqppo_backends.storage.ray_store")
simple = importlib.import_module("tqppo_backends.storage.simple")
transferqueue = importlib.import_module("tqppo_backends.storage.transferqueue")


class Adder(nodes.NodeActor):  # type: ignore[misc,name-defined]
    def add(self, one: int, other: int) -> int:
        return one + other

    def close(self) -> None:
        return None


async def awaited(reply: Any) -> Any:
    return await reply


@pytest.mark.slow
def test_an_actor_is_started_called_by_its_methods_and_gone_after_close(local_ray: None) -> None:
    here, spec = this_node(), StorageSpec("nodestest", 1 << 20, timeout_s=30)
    ray.cloudpickle.register_pickle_by_value(importlib.import_module(Adder.__module__))
    started, found = nodes.NodeActors(spec), nodes.NodeActors(spec)
    with pytest.raises(DataLost, match=f"the storage of node {here} is gone"):
        found.get(here)
    run(started.start(here, Adder))
    assert here in started
    assert started.nodes() == [here]
    assert run(awaited(found.ask(here, Adder.add, 2, 3))) == 5
    run(started.close())
    with pytest.raises((DataLost, DeadlineExceeded)):
        run(awaited(found.ask(here, Adder.add, 2, 3)))


def test_only_the_simple_storage_works_without_ray() -> None:
    alone = StorageSpec("nodestest", 1 << 20, distributed=False)
    assert simple.SimpleStorage(alone).node == "local"
    for storage in (ray_store.RayStorage, transferqueue.TransferQueueStorage):
        with pytest.raises(BackendError, match=r"Ray|extra"):
            storage(alone)


def test_small_pieces_share_an_object_and_a_wide_one_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_store, "OBJECT_BYTES", 100)
    pieces = {start: np.zeros(size, np.uint8) for start, size in [(0, 30), (64, 60), (128, 500), (640, 20), (704, 20)]}
    assert ray_store._grouped(pieces) == [[0, 64], [128], [640, 704]]


def test_a_block_without_its_files_is_lost() -> None:
    spec = StorageSpec("nofilestest", 1 << 20, distributed=False)
    with pytest.raises(DataLost, match="files on node local are gone: tqppo-queue-nofilestest-local"):
        simple.find(spec, "local")


def test_calls_of_one_thread_run_in_order_and_hand_their_errors_on() -> None:
    thread, seen = transferqueue.CallThread(), []
    first, second = thread.submit(lambda: seen.append(1)), thread.submit(lambda: 1 / 0)
    third = thread.submit(lambda: seen.append(2))
    third.result(20)
    assert first.done()
    assert seen == [1, 2]
    with pytest.raises(ZeroDivisionError):
        second.result(0)
    thread.end()
