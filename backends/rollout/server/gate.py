"""Keeps requests and weight updates of one server apart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tqppo.errors import EngineError


class Gate:
    """Requests run concurrently; a weight update waits until they have ended and holds new ones back meanwhile."""

    def __init__(self) -> None:
        self._open, self._empty, self._num_running = asyncio.Event(), asyncio.Event(), 0
        self._open.set()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def passing(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold the gate open during one request; waits while an update has it closed, for `timeout_s` at most."""
        await self._opened(timeout_s, "a request")
        self._num_running += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def closed(self, timeout_s: float) -> AsyncIterator[None]:
        """Keep requests out during a weight update. Raises if some are still running after `timeout_s`."""
        await self._opened(timeout_s, "a weight update")
        self._open.clear()
        try:
            await self._drained(timeout_s)
            yield
        finally:
            self._open.set()

    async def _opened(self, timeout_s: float, waits: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._open.is_set():  # another update may close it again before this task runs
            try:
                await asyncio.wait_for(self._open.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise EngineError(f"{waits} waited {timeout_s:g} s for a weight update to end") from None

    async def _drained(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise EngineError(f"{self._num_running} requests were still running after {timeout_s:g} s") from None
