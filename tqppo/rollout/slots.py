"""Which sessions play now: all of them or a limited number at a time. The rollout worker makes one per call.

A session that ends lets the next one in, in the order of the prompts. The engine learns of the new one before it learns
that the old one has ended, so which sessions wait for each other there does not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from tqppo.protocols import RolloutEngine

T = TypeVar("T")


class Playing:
    """Holds one slot. A generator made into a context manager would cost several times as much."""

    __slots__ = ("_session", "_slots")

    def __init__(self, slots: SessionSlots, session: str) -> None:
        self._slots, self._session = slots, session

    async def __aenter__(self) -> None:
        try:
            await self._slots.enter(self._session)
        except BaseException:
            self._slots.leave(self._session)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._slots.leave(self._session)


class SessionSlots:
    """Lets sessions play on one engine, at most `limit` at a time; 0: all of them."""

    def __init__(self, engine: RolloutEngine, sessions: Sequence[str], *, batch: str, limit: int) -> None:
        self._engine = engine
        self._batch = batch
        count = limit or len(sessions)
        loop = asyncio.get_running_loop()
        self._waiting = {session: loop.create_future() for session in sessions[count:]}
        engine.expect(sessions[:count], batch)

    def playing(self, session: str) -> Playing:
        """`async with` waits for a slot and holds it. At the end the engine releases what it keeps for the session."""
        return Playing(self, session)

    async def enter(self, session: str) -> None:
        if session in self._waiting:
            await self._waiting[session]

    def leave(self, session: str) -> None:
        if session in self._waiting:  # cancelled before it had a slot
            del self._waiting[session]
            return
        if self._waiting:
            following, begin = next(iter(self._waiting.items()))
            del self._waiting[following]
            self._engine.expect([following], self._batch)
            begin.set_result(None)
        self._engine.end_session(session)


async def all_or_none(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. When one fails, or the caller is cancelled, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
