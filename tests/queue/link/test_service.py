"""The index with its storage in one process."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from tqppo.errors import DeadlineExceeded, QueueError
from tqppo.queue.connection import Connection
from tqppo.queue.index.compaction import Compaction
from tqppo.queue.index.index import Index
from tqppo.queue.index.snapshots import Snapshots
from tqppo.queue.link.calls import run
from tqppo.queue.link.service import LocalLink, Service, methods_of
from tqppo.queue.storage import StorageSpec


def made() -> Service:
    return Service("simple", StorageSpec("servicetest", 1 << 20, distributed=False))


def test_every_method_that_clients_call_is_served_under_its_own_name() -> None:
    methods = methods_of(Index(100, lambda locators: None))
    for owner in (Index, Compaction, Snapshots):
        public = {name for name in vars(owner) if not name.startswith("_")}
        served = public & set(methods)
        assert all(methods[name].__func__ is getattr(owner, name) for name in served)  # type: ignore[attr-defined]
    assert {"publish", "locate", "survivors", "dump", "load"} <= set(methods)


def test_a_caller_that_disconnects_is_not_waited_for() -> None:
    service = made()

    async def gone() -> None:
        await asyncio.sleep(0.01)

    async def work() -> None:
        with pytest.raises(ConnectionError, match="disconnected"):
            await service.call("wait", ("train", ["never"], {}, 1), 60.0, gone)
        with pytest.raises(DeadlineExceeded, match="never"):
            await service.call("wait", ("train", ["never"], {}, 1), 0.01)

    asyncio.run(work())


def test_a_local_link_stays_in_its_process_and_its_connection_calls_the_index() -> None:
    link = LocalLink(made())
    connection = Connection("simple", StorageSpec("servicetest", 1 << 20, distributed=False), link)
    assert run(connection.call(Index.tag)("train", ["a"], [{"n": 1}])) == 1
    assert run(connection.call(Index.list)("train", None, None))[0] == ["a"]
    with pytest.raises(QueueError, match="one process"):
        pickle.dumps(link)
    link.close()


def test_a_closed_connection_refuses_calls() -> None:
    spec = StorageSpec("closedtest", 1 << 20, distributed=False)
    connection = Connection("simple", spec, LocalLink(Service("simple", spec)))
    connection.own()
    connection.close()
    connection.close()
    with pytest.raises(QueueError, match="closed"):
        run(connection.call(Index.stats)())
