"""Requests on one side, weight updates on the other: never both at a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tqppo.errors import EngineError


class Gate:
    """Requests pass together; a weight update waits until they are out, and keeps new ones waiting meanwhile."""

    def __init__(self) -> None:
        self._open, self._empty, self._inside = asyncio.Event(), asyncio.Event(), 0
        self._open.set()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def closed(self, timeout_s: float) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._open.clear()
        try:
            await self._drained(timeout_s)
            yield
        finally:
            self._open.set()

    async def _drained(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise EngineError(f"{self._inside} requests were still running after {timeout_s:g} s") from None
