"""Calls over the local socket: which values travel, which calls go through Ray instead, and who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tqppo.errors import DataLost, QueueError
from tqppo.queue.index.answers import Located
from tqppo.queue.link import wire
from tqppo.queue.link.calls import NoAnswer
from tqppo.queue.storage import Locator, StorageSpec

SPEC = StorageSpec("wiretest", 1 << 20, token="secret")


released: list[Any] = []


async def handle(method: str, args: tuple[Any, ...], timeout_s: float, disconnected: wire.Disconnected) -> Any:
    if method == "release":
        released.append(args[0])
    if method == "wait":
        await disconnected()
        released.append(args[0])
        raise ConnectionError("the caller disconnected")
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
async def server() -> AsyncIterator[wire.SocketServer]:
    made = wire.SocketServer(SPEC, handle)
    await made.open()
    yield made
    made.close()
    await asyncio.sleep(0.01)  # until its connections are closed


async def ask(client: wire.SocketClient, method: str, *args: Any, timeout_s: float = 20.0) -> Any:
    exchange = client.call(method, args, timeout_s, 0.0)
    assert exchange is not None
    return await exchange


def test_values_arrive_as_they_were() -> None:
    async def work() -> None:
        async with server():
            client = wire.SocketClient(SPEC)
            located = Located([(3, Locator("n", "b", 9, "file"))], [(["x"], np.array([0, 0]), np.array([2, 1]))])
            _, locator, found, text = await ask(client, "publish", located.blocks[0][1], located, "zażółć")
            assert (locator, text) == (located.blocks[0][1], "zażółć")
            assert found.blocks == located.blocks
            assert found.groups[0][2].tolist() == [2, 1]
            assert await ask(client, "tag", {"a": {"n": np.int64(3), "x": None}}) == ["tag", {"a": {"n": 3, "x": None}}]
            client.close()

    asyncio.run(work())


def test_errors_keep_their_class_and_a_missing_answer_is_an_error_at_the_deadline() -> None:
    async def work() -> None:
        async with server():
            client = wire.SocketClient(SPEC)
            with pytest.raises(QueueError, match="no such rows: a"):
                await ask(client, "clear", "a")
            with pytest.raises(NoAnswer, match=r"0\.1 s"):
                await ask(client, "list", timeout_s=0.1)
            assert await ask(client, "tag", 1) == ["tag", 1]  # not the late answer of the call before
            client.close()

    asyncio.run(work())


def test_a_mistake_at_the_index_is_an_error_and_not_a_dead_index() -> None:
    async def work() -> None:
        async with server():
            client = wire.SocketClient(SPEC)
            with pytest.raises(QueueError, match="KeyError: 'a mistake'"):
                await ask(client, "locate")
            assert await ask(client, "tag", 1) == ["tag", 1]
            client.close()

    asyncio.run(work())


async def until_released(count: int) -> None:
    deadline = time.monotonic() + 20
    while len(released) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def test_a_client_that_disconnects_is_not_waited_for_and_its_tickets_are_released() -> None:
    async def work() -> None:
        async with server():
            released.clear()
            client = wire.SocketClient(SPEC)
            name = client.client_name()
            assert client.client_name() == name
            waiting = asyncio.ensure_future(ask(client, "wait", "a call"))
            await asyncio.sleep(0.1)
            waiting.cancel()
            await asyncio.wait({waiting})
            await until_released(1)
            await asyncio.sleep(0.2)
            assert released == ["a call"]  # and not what others of this process have
            client.close()  # as when the process ends
            await until_released(2)
            assert released == ["a call", name]

    asyncio.run(work())


def test_values_that_are_not_json_are_collected_through_ray() -> None:
    async def work() -> None:
        async with server() as served:
            client = wire.SocketClient(SPEC)
            with pytest.raises(wire.NotJson) as odd:
                await ask(client, "stats")
            assert served.collect(odd.value.number) == {"odd": {1, 2}}
            assert client.call("stats", (), 1.0, 0.0) is None  # from now on
            assert client.call("dump", (), 1.0, 0.0) is None
            assert client.call("tag", ({"a": {"set": {1}}},), 1.0, 0.0) is None
            client.close()

    asyncio.run(work())


def test_concurrent_calls_have_their_own_connections_which_are_reused() -> None:
    async def work() -> None:
        async with server():
            client = wire.SocketClient(SPEC)
            for _ in range(3):
                found = await asyncio.gather(*(ask(client, "tag", i) for i in range(20)))
                assert found == [["tag", i] for i in range(20)]
            assert len(client._idle) <= 20
            client.close()

    asyncio.run(work())


def test_a_client_whose_server_is_gone_still_has_a_name() -> None:
    here, there = socket.socketpair()
    client = wire.SocketClient(SPEC)
    client.take_back(here)  # used before, and now
    there.close()
    assert client.client_name()
    client.close()


def test_a_client_without_the_token_is_not_answered() -> None:
    async def work() -> None:
        async with server():
            other = wire.SocketClient(StorageSpec(SPEC.run, 1 << 20, token="guess"))
            with pytest.raises(DataLost, match="closed the connection"):
                await ask(other, "tag", 1)

    asyncio.run(work())


# Connects to the index as another user, sends nothing, and prints what it gets until the connection closes.
STRANGER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
caller = socket.socket(socket.AF_UNIX)
caller.settimeout(20)
caller.connect("\\0tqppo-" + sys.argv[1])
print(caller.recv(1))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_processes_of_other_users_do_not_keep_a_connection_open() -> None:
    async def work() -> None:
        async with server() as made:
            pipe = asyncio.subprocess.PIPE
            stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, SPEC.run, stdout=pipe)
            printed, _ = await stranger.communicate()
            assert printed == b"b''\n"
            assert not made._writers

    asyncio.run(work())


def test_a_caller_that_does_not_send_its_token_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_HELLO_S", 0.1)

    async def work() -> None:
        async with server() as made:
            reader, writer = await asyncio.open_unix_connection(f"\0tqppo-{SPEC.run}")
            assert await asyncio.wait_for(reader.read(), 20) == b""
            assert not made._writers
            writer.close()

    asyncio.run(work())


def test_connections_without_a_token_are_few_and_others_are_answered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_HELLO_S", 20.0)
    monkeypatch.setattr(wire, "_most_silent", lambda: 64)

    async def work() -> None:
        async with server() as made:
            silent = [await asyncio.open_unix_connection(f"\0tqppo-{SPEC.run}") for _ in range(64 + 8)]
            hung_up = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
            await asyncio.wait(hung_up, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.1)
            assert (sum(each.done() for each in hung_up), len(made._writers)) == (8, 64)
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*hung_up)
            client = wire.SocketClient(SPEC)
            assert await ask(client, "tag", 1) == ["tag", 1]
            client.close()

    asyncio.run(work())


def test_a_client_that_was_held_up_while_it_connected_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, attempts = wire._connected, []

    def slow_at_first(spec: StorageSpec) -> socket.socket | None:
        attempts.append(connect(spec))
        time.sleep(0.1 if len(attempts) == 1 else 0)
        return attempts[-1]

    async def work() -> None:
        async with server():
            client = wire.SocketClient(SPEC)
            await ask(client, "tag", 1)
            client.close()

    monkeypatch.setattr(wire, "_HELLO_S", 0.1)
    monkeypatch.setattr(wire, "_connected", slow_at_first)
    asyncio.run(work())
    assert len(attempts) == 2
    assert attempts[0].fileno() == -1


def test_without_a_server_calls_go_through_ray() -> None:
    assert wire.SocketClient(StorageSpec("absent", 1 << 20)).call("tag", (), 1.0, 0.0) is None


def test_an_index_that_takes_no_more_callers_is_not_waited_for() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as still, contextlib.ExitStack() as callers:
        still.bind(wire._address(SPEC))
        still.listen(0)
        for _ in range(2):  # as many as the kernel takes for a process that does not accept
            caller = callers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(wire._address(SPEC))
        began = time.monotonic()
        assert wire.SocketClient(SPEC).call("room", (), 20.0, 0.0) is None
        assert time.monotonic() - began < 5
