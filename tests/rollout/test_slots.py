"""A limited number of sessions at a time, and work that ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from tqppo.protocols import RolloutEngine
from tqppo.rollout.slots import SessionSlots, all_or_none


class ListeningEngine:
    """Writes down what it is told of sessions."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        self.heard += [f"+{session}" for session in sessions]

    def end_session(self, session: str) -> None:
        self.heard.append(f"-{session}")


def test_a_session_that_ends_lets_the_next_one_in_before_the_engine_stops_waiting_for_it() -> None:
    engine, most, running = ListeningEngine(), 0, 0

    async def session(slots: SessionSlots, name: str) -> None:
        nonlocal most, running
        async with slots.playing(name):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    async def run() -> None:
        slots = SessionSlots(cast(RolloutEngine, engine), list("abcd"), batch="x", limit=2)
        await asyncio.gather(*(session(slots, name) for name in "dcba"))

    asyncio.run(run())
    assert most == 2
    assert engine.heard[:3] == ["+a", "+b", "+c"]
    assert [each for each in engine.heard if "+" in each] == ["+a", "+b", "+c", "+d"]
    assert sorted(engine.heard[2:]) == ["+c", "+d", "-a", "-b", "-c", "-d"]


def test_a_session_that_is_cancelled_before_it_plays_gives_its_turn_away() -> None:
    engine = ListeningEngine()

    async def run() -> None:
        slots = SessionSlots(cast(RolloutEngine, engine), list("abc"), batch="x", limit=1)

        async def session(name: str) -> None:
            async with slots.playing(name):
                await asyncio.sleep(0.01)

        tasks = {name: asyncio.ensure_future(session(name)) for name in "abc"}
        await asyncio.sleep(0)
        tasks["b"].cancel()
        await asyncio.wait(tasks.values())

    asyncio.run(run())
    assert engine.heard == ["+a", "+c", "-a", "-c"]


def test_when_one_fails_the_others_have_ended() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("waiting")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(all_or_none([wait(), fail(), wait()]))
    assert ended == ["waiting", "waiting"]
