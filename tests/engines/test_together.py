"""Requests as one batch of sessions: all announced before the first is sent, all ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from tqppo.engines.together import generate_together
from tqppo.errors import EngineError
from tqppo.protocols import Completion, Request, RolloutEngine, Sampling


class StrictEngine:
    """Refuses long prompts and sessions that it does not expect."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        assert batch
        self.live.update(sessions)

    def end_session(self, session: str) -> None:
        self.live.remove(session)

    async def generate(self, request: Request) -> Completion:
        assert request.session in self.live
        await asyncio.sleep(0)
        if len(request.tokens) > 2:
            raise EngineError("too long")
        return Completion([request.seed], [0.0], "stop", 0)


def test_every_request_is_a_session_of_its_own_that_ends() -> None:
    engine = StrictEngine()
    asked = [Request([1], Sampling(), seed, f"r{seed}") for seed in range(3)]
    done = asyncio.run(generate_together(cast(RolloutEngine, engine), asked))
    assert [each.tokens for each in done] == [[0], [1], [2]]
    assert not engine.live


def test_a_request_that_is_refused_ends_its_session_too() -> None:
    engine = StrictEngine()
    asked = [Request([1] * length, Sampling(), 0, f"r{length}") for length in (1, 9)]
    with pytest.raises(EngineError, match="too long"):
        asyncio.run(generate_together(cast(RolloutEngine, engine), asked))
    assert not engine.live
