"""HTTP requests to one server: pooled connections, deadlines, and an error at once when the server's process ends."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tqppo.errors import EngineError

from .process import ServerProcess

NUM_RETRIES = 3  # after a connection error while the server lives; a request carries its seed, so it can be repeated
CONNECT_TIMEOUT_S = 30.0
IDLE_S = 2.0  # a connection that was idle for longer is not used again: servers close theirs after some seconds
BROKEN = (aiohttp.ClientError, OSError)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    is_json: bool
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class ServerDied(EngineError):
    """The server's process ended; the request can be sent to another one."""


class EngineServer:
    """A server at `url`, with its process if tqppo started it. `dying_s`: see `ServerApi`."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        process: ServerProcess | None,
        token: str,
        num_connections: int,
        dying_s: float,
    ) -> None:
        self.name, self.url, self.process = name, url, process
        self.identity = secrets.token_hex(8)  # the next server at the same place has another
        self.num_bytes_received = 0  # contents of all responses
        self._dying_s = dying_s
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            connector=aiohttp.TCPConnector(limit=num_connections, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    @property
    def is_alive(self) -> bool:
        return self.process is None or self.process.is_alive

    def death(self) -> ServerDied:
        """The error of a server whose process has ended."""
        assert self.process is not None, "the process of a server that tqppo attached to is unknown"
        code = self.process.exited.result()
        return ServerDied(f"{self.name} ended with code {code}; the end of its log:\n{self.process.tail()}")

    async def ask(self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float) -> Any:
        """The decoded JSON of the response; None if it is not JSON. See `ask_bytes` for errors."""
        answer = await self._answer(method, path, body, timeout_s)
        return json.loads(answer.content) if answer.is_json and answer.content else None

    async def ask_bytes(self, method: str, path: str, body: Mapping[str, object], *, timeout_s: float) -> bytes:
        """The content of the response. A refusal is an EngineError that quotes the server."""
        return (await self._answer(method, path, body, timeout_s)).content

    async def has_route(self, path: str) -> bool:
        """Whether a `GET` of the path answers 200."""
        return (await self._send("GET", path, None, time.monotonic() + CONNECT_TIMEOUT_S)).status == 200

    async def _answer(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Response:
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + timeout_s
        for attempt in range(NUM_RETRIES + 1):
            try:
                answer = await self._send(method, path, content, deadline)
            except asyncio.TimeoutError:
                raise EngineError(f"{self.name}: {path} did not answer within {timeout_s:g} s") from None
            except BROKEN as error:
                await self._raise_if_dying()  # a dying server breaks its connections shortly before it ends
                if attempt == NUM_RETRIES:
                    raise EngineError(f"{self.name}: {path} cannot be reached at {self.url}: {error!r}") from error
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            if answer.status >= 500:
                await self._raise_if_unhealthy()
            if answer.status >= 400:
                raise EngineError(f"{self.name}: {path} answered {answer.status}: {answer.text[:2000]}")
            return answer
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, method: str, path: str, content: bytes | None, deadline: float) -> Response:
        if self._session.closed:  # between two attempts of one request
            raise EngineError(f"{self.name} was closed") if self.is_alive else self.death()
        task = asyncio.ensure_future(self._exchange(method, path, content))
        ends: list[asyncio.Future[Response] | asyncio.Future[int]] = [task]
        if self.process is not None:
            ends.append(self.process.exited)
        try:
            remaining = max(deadline - time.monotonic(), 0.0)
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise asyncio.TimeoutError if self.is_alive else self.death()
        finally:
            task.cancel()

    async def _exchange(self, method: str, path: str, content: bytes | None) -> Response:
        async with self._session.request(method, self.url + path, data=content) as response:
            content = await response.read()
            self.num_bytes_received += len(content)
            return Response(response.status, response.content_type == "application/json", content)

    async def _raise_if_dying(self) -> None:
        if self.process is not None:
            await asyncio.wait({self.process.exited}, timeout=self._dying_s)
            if not self.is_alive:
                raise self.death()

    async def _raise_if_unhealthy(self) -> None:
        """End a server that answers 500 and is unhealthy: it has lost its engine, even if its process stays."""
        await self._raise_if_dying()
        if self.process is not None and not await self.is_healthy():
            await self.process.close()
            raise self.death()

    async def is_healthy(self) -> bool:
        try:
            answer = await self._send("GET", "/health", None, time.monotonic() + 20)
        except (*BROKEN, asyncio.TimeoutError, EngineError):
            return False
        return answer.status == 200

    async def close(self) -> None:
        await self._session.close()
        if self.process is not None:
            await self.process.close()
