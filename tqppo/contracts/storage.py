"""What every storage must do, tested through a queue: exact bytes, strict errors, bounded memory.

`tqppo backends check storage NAME` runs it. A test file can import everything from here and define `backend_name`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tqppo.contracts.storage_life import *  # noqa: F403
from tqppo.contracts.storage_rows import MIB
from tqppo.contracts.storage_values import *  # noqa: F403
from tqppo.queue.client import Queue


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """The Ray that is running, or a private one."""
    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=512 * MIB)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_queue(cluster: None, backend_name: str) -> Iterator[Queue]:
    queue = Queue.create(backend_name, budget_bytes=256 * MIB, timeout_s=90)
    yield queue
    queue.close()


@pytest.fixture
def queue(shared_queue: Queue) -> Iterator[Queue]:
    """An empty queue; the test may leave rows in it."""
    yield shared_queue
    for partition in shared_queue.stats()["partitions"]:
        shared_queue.clear(shared_queue.list(partition))
    left = shared_queue.stats()
    assert (left["rows"], left["bytes"], left["blocks"]) == (0, 0, 0)
