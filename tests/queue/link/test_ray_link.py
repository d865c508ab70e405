"""The index as a Ray actor."""

from __future__ import annotations

import pickle

import pytest

from tqppo.errors import QueueError
from tqppo.queue.client import Queue
from tqppo.queue.link.ray_link import RayLink


@pytest.mark.usefixtures("local_ray")
def test_the_link_finds_its_actor_by_name_in_another_handle_until_the_queue_is_closed() -> None:
    queue = Queue.create(budget_bytes=1 << 20)
    link, after = (pickle.loads(pickle.dumps(queue._connection.link)) for _ in range(2))
    assert isinstance(link, RayLink)
    assert link.name == f"tqppo-{queue.spec.run}-index"
    assert link._handle() is not None
    assert queue.handle().stats()["rows"] == 0
    queue.close()
    with pytest.raises(QueueError, match="is closed, or its index died"):
        after._handle()
