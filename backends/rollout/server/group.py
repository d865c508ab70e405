"""Weights over a process group of one server and the publisher's node: made once per server, used at every sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from tqppo.errors import EngineError, TqppoError
from tqppo.protocols import Offer, WeightSender

from .http import Server

log = logging.getLogger(__name__)
LAST_WORDS_S = 5.0  # when the sender fails, how long the server may take to say why


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a server is told to join: the sender is rank 0, the server's own ranks follow."""

    group: str
    host: str
    port: int
    num_ranks: int
    backend: str
    timeout_s: float

    @staticmethod
    def at(offer: Offer, *, num_ranks: int, on_gpu: bool, timeout_s: float) -> Meeting:
        name, backend = f"tqppo-{secrets.token_hex(8)}", "nccl" if on_gpu else "gloo"
        return Meeting(name, offer.host, offer.port, num_ranks, backend, timeout_s)


@dataclass(frozen=True, slots=True)
class Group:
    """A group that both sides have joined."""

    name: str
    sender: WeightSender
    server: Server

    async def leave(self) -> None:
        """The sender's side; the server's ends with the server."""
        with contextlib.suppress(TqppoError):
            await self.sender.leave(self.name)


async def together(server: Awaitable[Any], sender: Awaitable[Any], timeout_s: float) -> None:
    """Both ends of one transfer; the first failure ends the other, and the server's own words come first."""
    tasks = [asyncio.ensure_future(server), asyncio.ensure_future(sender)]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if done and pending:
            late, pending = await asyncio.wait(pending, timeout=LAST_WORDS_S)
            done |= late
        for task in tasks:
            if task in done:
                task.result()
        if pending:
            raise EngineError(f"weights were not transferred within {timeout_s:g} s")
    finally:
        for task in tasks:
            task.cancel()
