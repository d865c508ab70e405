"""Finds and stops the processes of a queue, and checks how soon calls report their loss."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from tqppo.errors import QueueError
from tqppo.queue.client import Queue

SOON_S = 5.0


def this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def index_of(queue: Queue) -> Any:
    return ray.get_actor(f"tqppo-{queue.spec.run}-index")


def storage_of(queue: Queue, node: str = "") -> Any:
    return ray.get_actor(f"tqppo-{queue.spec.run}-storage-{(node or this_node())[:16]}")


def process_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


@contextlib.contextmanager
def stopped(actor: Any) -> Iterator[None]:
    """Suspend the actor's process: it is alive but answers nothing."""
    pid = process_of(actor)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def lost_soon(work: Callable[[], Any], match: str, kind: type[QueueError] = QueueError) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=match):
        work()
    took = time.monotonic() - began
    assert took < SOON_S, f"{took:.1f} s"
