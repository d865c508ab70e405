"""Requests to one server: pooled, with deadlines, failing at once when the server's process ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tqppo.errors import EngineError

from .process import ServerProcess

NUM_RETRIES = 3  # of a connection error while the server lives; requests are repeatable, their seed goes with them
CONNECT_TIMEOUT_S = 30.0
IDLE_S = 2.0  # a connection that was idle for longer is not used again: servers close theirs after some seconds
BROKEN = (aiohttp.ClientError, OSError)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    is_json: bool
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class ServerDied(EngineError):
    """The server's process ended; another one may take over."""


class Server:
    """A server that answers at `url`, and its process when it is ours."""

    dying_s = 20.0  # how long one may take to end after it has shown that it will; some write dumps first

    def __init__(self, name: str, url: str, *, process: ServerProcess | None, token: str, num_connections: int) -> None:
        self.name, self.url, self.process = name, url, process
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            connector=aiohttp.TCPConnector(limit=num_connections, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    @property
    def is_alive(self) -> bool:
        return self.process is None or self.process.is_alive

    def death(self) -> ServerDied:
        assert self.process is not None, "a server that is not ours cannot be seen dying"
        code = self.process.exited.result()
        return ServerDied(f"{self.name} ended with code {code}; the end of its log:\n{self.process.tail()}")

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The decoded answer. A refusal is an EngineError with the server's own words."""
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + timeout_s
        for attempt in range(NUM_RETRIES + 1):
            try:
                answer = await self._send(method, path, content, deadline)
            except asyncio.TimeoutError:
                raise EngineError(f"{self.name}: {path} did not answer within {timeout_s:g} s") from None
            except BROKEN as error:
                await self._or_death()  # a dying server breaks its connections shortly before it ends
                if attempt == NUM_RETRIES:
                    raise EngineError(f"{self.name}: {path} cannot be reached at {self.url}: {error!r}") from error
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            if answer.status >= 500:
                await self._or_sickness()
            if answer.status >= 400:
                raise EngineError(f"{self.name}: {path} answered {answer.status}: {answer.text[:2000]}")
            return json.loads(answer.content) if answer.is_json and answer.content else None
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, method: str, path: str, content: bytes | None, deadline: float) -> Answer:
        task = asyncio.ensure_future(self._exchange(method, path, content))
        ends: list[asyncio.Future[Any]] = [task] if self.process is None else [task, self.process.exited]
        try:
            remaining = max(deadline - time.monotonic(), 0.0)
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise asyncio.TimeoutError if self.is_alive else self.death()
        finally:
            task.cancel()

    async def _exchange(self, method: str, path: str, content: bytes | None) -> Answer:
        async with self._session.request(method, self.url + path, data=content) as response:
            return Answer(response.status, response.content_type == "application/json", await response.read())

    async def _or_death(self) -> None:
        if self.process is not None:
            await asyncio.wait({self.process.exited}, timeout=self.dying_s)
            if not self.is_alive:
                raise self.death()

    async def _or_sickness(self) -> None:
        """A server that answers 500 and is not healthy either has lost its engine, whether or not it ends by itself."""
        await self._or_death()
        if self.process is not None and not await self.is_healthy():
            await self.process.close()
            raise self.death()

    async def is_healthy(self) -> bool:
        try:
            answer = await self._send("GET", "/health", None, time.monotonic() + 20)
        except (*BROKEN, asyncio.TimeoutError, ServerDied):
            return False
        return answer.status == 200

    async def close(self) -> None:
        await self._session.close()
        if self.process is not None:
            await self.process.close()
