"""Requests to one server: pooled, with deadlines, failing at once when the server's process ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx

from tqppo.errors import EngineError

from ._process import ServerProcess

NUM_RETRIES = 3  # of a connection error while the server lives; requests are repeatable, their seed goes with them


class ServerDied(EngineError):
    """The server's process ended; another one may take over."""


class Server:
    """A server that answers at `url`, and its process when it is ours."""

    dying_s = 20.0  # how long one may take to end after it has shown that it will; some write dumps first

    def __init__(self, name: str, url: str, *, process: ServerProcess | None, token: str, num_connections: int) -> None:
        self.name, self.url, self.process = name, url, process
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._idle: list[httpx.AsyncClient] = []
        self._slots = asyncio.Semaphore(num_connections)

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
            except httpx.ReadTimeout:
                raise EngineError(f"{self.name}: {path} did not answer within {timeout_s:g} s") from None
            except httpx.TransportError as error:
                await self._or_death()  # a dying server breaks its connections shortly before it ends
                if attempt == NUM_RETRIES:
                    raise EngineError(f"{self.name}: {path} cannot be reached at {self.url}: {error!r}") from error
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            if answer.status_code >= 500:
                await self._or_sickness()
            if answer.status_code >= 400:
                raise EngineError(f"{self.name}: {path} answered {answer.status_code}: {answer.text[:2000]}")
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return json.loads(answer.content) if is_json and answer.content else None
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, method: str, path: str, content: bytes | None, deadline: float) -> httpx.Response:
        task = asyncio.ensure_future(self._exchange(method, path, content))
        ends: list[asyncio.Future[Any]] = [task] if self.process is None else [task, self.process.exited]
        try:
            remaining = max(deadline - time.monotonic(), 0.0)
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise httpx.ReadTimeout("deadline") if self.is_alive else self.death()
        finally:
            task.cancel()

    async def _exchange(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        """One client per connection: httpx's own pool takes ten times as long with hundreds of them."""
        async with self._slots:
            client = self._idle.pop() if self._idle else self._new_client()
            try:
                return await client.request(method, path, content=content)
            finally:
                self._idle.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={**self._headers, "Content-Type": "application/json"},
            timeout=httpx.Timeout(None, connect=30.0),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            trust_env=False,  # a proxy would not reach loopback
            verify=self.url.startswith("https"),  # loading certificates takes long
        )

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
        except (httpx.TransportError, ServerDied):
            return False
        return answer.status_code == 200

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._idle))
        if self.process is not None:
            await self.process.close()
