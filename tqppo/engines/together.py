"""Sends requests to an engine as one batch of sessions with one turn each; the doctor, contracts and benches use it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

from tqppo.protocols import Completion, Request, RolloutEngine

_NUMBERS = itertools.count()


async def generate_together(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    """The completions in order. A deterministic engine gives the same bytes in whatever order the requests arrive."""
    batch = f"together-{next(_NUMBERS)}"
    asked = [replace(request, session=f"{batch}-{request.request_id}") for request in requests]
    engine.expect([request.session for request in asked], batch)

    async def generate(request: Request) -> Completion:
        try:
            return await engine.generate(request)
        finally:
            engine.end_session(request.session)

    return list(await asyncio.gather(*map(generate, asked)))
