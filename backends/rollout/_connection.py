"""One HTTP/1.1 connection, kept open. General clients take 2 ms of a core per request: more than a small model does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 30.0


class Broken(Exception):
    """The connection failed, or what came over it is not HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in lower case
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class Address:
    """Where a server is, and what every request to it begins with."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None  # loading certificates takes long
        always = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in always.items())

    def request(self, method: str, path: str, content: bytes | None) -> bytes:
        body = content or b""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._keeps = True

    @staticmethod
    async def open(address: Address) -> Connection:
        opening: Any = asyncio.open_connection(address.host, address.port, ssl=address.ssl)
        try:
            return Connection(*await asyncio.wait_for(opening, CONNECT_TIMEOUT_S))
        except (OSError, asyncio.TimeoutError) as error:
            raise Broken(repr(error)) from error

    @property
    def is_open(self) -> bool:
        """Servers close connections that are idle for some seconds."""
        return self._keeps and not self._reader.at_eof() and not self._writer.is_closing()

    async def exchange(self, request: bytes) -> Answer:
        try:
            self._writer.write(request)
            await self._writer.drain()
            status, headers = await self._head()
            content = await self._body(headers)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Broken(repr(error)) from error
        self._keeps = self._keeps and headers.get("connection", "").lower() != "close"
        return Answer(status, headers, content)

    async def _head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in fields}

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return b"".join([chunk async for chunk in self._chunks()])
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        self._keeps = False  # the body ends with the connection
        return await self._reader.read()

    async def _chunks(self) -> Any:
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abandon(self) -> None:
        """Without waiting; nothing more can be made of it."""
        self._writer.transport.abort()
