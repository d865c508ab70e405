"""A process group of one server and the publisher's node: made once per server, used for every weight update."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass

from tqppo.errors import EngineError, TqppoError
from tqppo.protocols import Offer, WeightSender

from .http import EngineServer

REASON_S = 5.0  # when the sender fails first, how long to wait for the server's own error, which says more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How a server joins a group: the sender is rank 0, the server's own ranks follow."""

    group: str
    host: str
    port: int
    num_ranks: int
    backend: str
    timeout_s: float

    @staticmethod
    def at(offer: Offer, *, num_ranks: int, on_gpu: bool, timeout_s: float) -> Rendezvous:
        name, backend = f"tqppo-{secrets.token_hex(8)}", "nccl" if on_gpu else "gloo"
        return Rendezvous(name, offer.host, offer.port, num_ranks, backend, timeout_s)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group that the sender and a server have joined."""

    name: str
    sender: WeightSender
    server: EngineServer

    async def leave(self) -> None:
        """Remove the sender from the group; the server's side ends with the server."""
        with contextlib.suppress(TqppoError):
            await self.sender.leave(self.name)


async def run_both(server: Awaitable[None], sender: Awaitable[None], timeout_s: float) -> None:
    """Run both ends of a transfer. If one fails the other is cancelled; the server's error takes precedence."""
    tasks = [asyncio.ensure_future(server), asyncio.ensure_future(sender)]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if done and pending:
            late, pending = await asyncio.wait(pending, timeout=REASON_S)
            done |= late
        for task in tasks:
            if task in done:
                task.result()
        if pending:
            raise EngineError(f"weights were not transferred within {timeout_s:g} s")
    finally:
        for task in tasks:
            task.cancel()
