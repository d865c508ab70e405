"""The short way to the index: what goes over it, what does not, and who may use it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tqppo.errors import DataLost, QueueError
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.index.index import Located
from tqppo.queue.link import wire
from tqppo.queue.link.calls import Silence

SPEC = StorageSpec("wiretest", 1 << 20, token="secret")


released: list[Any] = []


async def handle(method: str, args: tuple[Any, ...], timeout_s: float, gone: wire.Gone) -> Any:
    if method == "release":
        released.append(args[0])
    if method == "wait":
        await gone()
        released.append(args[0])
        raise ConnectionError("whoever asked is gone")
    if method == "locate":
        raise KeyError("a mistake")
    if method == "clear":
        raise QueueError(f"no such rows: {args[0]}")
    if method == "stats":
        return {"odd": {1, 2}}
    if method == "list":
        await asyncio.sleep(60)
    return [method, *args]


@contextlib.asynccontextmanager
async def desk() -> AsyncIterator[wire.Desk]:
    made = wire.Desk(SPEC, handle)
    await made.open()
    yield made
    made.close()


async def ask(line: wire.Wire, method: str, *args: Any, timeout_s: float = 20.0) -> Any:
    exchange = line.call(method, args, timeout_s, 0.0)
    assert exchange is not None
    return await exchange


def test_values_arrive_as_they_were() -> None:
    async def work() -> None:
        async with desk():
            line = wire.Wire(SPEC)
            located = Located([(3, Locator("n", "b", 9, "file"))], [(["x"], np.array([0, 0]), np.array([2, 1]))])
            _, locator, found, text = await ask(line, "publish", located.blocks[0][1], located, "zażółć")
            assert (locator, text) == (located.blocks[0][1], "zażółć")
            assert found.blocks == located.blocks
            assert found.groups[0][2].tolist() == [2, 1]
            assert await ask(line, "tag", {"a": {"n": np.int64(3), "x": None}}) == ["tag", {"a": {"n": 3, "x": None}}]
            line.close()

    asyncio.run(work())


def test_errors_keep_their_kind_and_silence_ends_at_the_deadline() -> None:
    async def work() -> None:
        async with desk():
            line = wire.Wire(SPEC)
            with pytest.raises(QueueError, match="no such rows: a"):
                await ask(line, "clear", "a")
            with pytest.raises(Silence, match=r"0\.1 s"):
                await ask(line, "list", timeout_s=0.1)
            assert await ask(line, "tag", 1) == ["tag", 1]  # not the late answer of the call before
            line.close()

    asyncio.run(work())


def test_a_mistake_at_the_index_is_an_error_and_not_a_dead_index() -> None:
    async def work() -> None:
        async with desk():
            line = wire.Wire(SPEC)
            with pytest.raises(QueueError, match="KeyError: 'a mistake'"):
                await ask(line, "locate")
            assert await ask(line, "tag", 1) == ["tag", 1]
            line.close()

    asyncio.run(work())


async def until_released(count: int) -> None:
    deadline = time.monotonic() + 20
    while len(released) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def test_who_leaves_gives_back_what_it_was_given_and_is_not_waited_for() -> None:
    async def work() -> None:
        async with desk():
            released.clear()
            line = wire.Wire(SPEC)
            name = line.client()
            assert line.client() == name
            waiting = asyncio.ensure_future(ask(line, "wait", "a call"))
            await asyncio.sleep(0.1)
            waiting.cancel()
            await asyncio.wait({waiting})
            await until_released(1)
            await asyncio.sleep(0.2)
            assert released == ["a call"]  # and not what others of this process have
            line.close()  # as when the process ends
            await until_released(2)
            assert released == ["a call", name]

    asyncio.run(work())


def test_what_is_more_than_json_takes_another_way() -> None:
    async def work() -> None:
        async with desk() as served:
            line = wire.Wire(SPEC)
            with pytest.raises(wire.NotPlain) as odd:
                await ask(line, "stats")
            assert served.collect(odd.value.ticket) == {"odd": {1, 2}}
            assert line.call("stats", (), 1.0, 0.0) is None  # from now on
            assert line.call("dump", (), 1.0, 0.0) is None
            assert line.call("tag", ({"a": {"set": {1}}},), 1.0, 0.0) is None
            line.close()

    asyncio.run(work())


def test_calls_at_the_same_time_have_connections_of_their_own_which_are_used_again() -> None:
    async def work() -> None:
        async with desk():
            line = wire.Wire(SPEC)
            for _ in range(3):
                found = await asyncio.gather(*(ask(line, "tag", i) for i in range(20)))
                assert found == [["tag", i] for i in range(20)]
            assert len(line._idle) <= 20
            line.close()

    asyncio.run(work())


def test_without_its_desk_a_client_still_has_a_name() -> None:
    here, there = socket.socketpair()
    line = wire.Wire(SPEC)
    line.take_back(here)  # used before, and now
    there.close()
    assert line.client()
    line.close()


def test_who_does_not_know_the_token_is_not_answered() -> None:
    async def work() -> None:
        async with desk():
            stranger = wire.Wire(StorageSpec(SPEC.run, 1 << 20, token="guess"))
            with pytest.raises(DataLost, match="closed the connection"):
                await ask(stranger, "tag", 1)

    asyncio.run(work())


def test_without_a_desk_there_is_no_wire() -> None:
    assert wire.Wire(StorageSpec("nobody", 1 << 20)).call("tag", (), 1.0, 0.0) is None
