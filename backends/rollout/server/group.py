"""How a server joins the process group in which it gets weights, and how both ends of a transfer are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from tqppo.errors import EngineError, PeerFailed
from tqppo.protocols import GroupPlace, Offer

REASON_S = 5.0  # when the sender fails first, how long to wait for the server's own error, which says more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The sender is rank 0, the ranks of all servers follow; this one's begin with `first_rank`."""

    group: str
    host: str
    port: int
    first_rank: int
    num_ranks: int
    backend: str
    timeout_s: float

    @staticmethod
    def at(offer: Offer, place: GroupPlace, *, backend: str, timeout_s: float) -> Rendezvous:
        return Rendezvous(place.group, offer.host, offer.port, place.first_rank, place.num_ranks, backend, timeout_s)


async def run_both(server: Awaitable[None], sender: Awaitable[None], timeout_s: float) -> None:
    """Run both ends of a transfer. If one fails the other is cancelled; the server's error takes precedence.

    When another engine failed, that is the reason, and not the broken connections which follow from it.
    """
    tasks = [asyncio.ensure_future(server), asyncio.ensure_future(sender)]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if done and pending:
            late, pending = await asyncio.wait(pending, timeout=REASON_S)
            done |= late
        errors = [task.exception() for task in tasks if task in done]
        for error in sorted(filter(None, errors), key=lambda error: not isinstance(error, PeerFailed)):
            raise error
        if pending:
            raise EngineError(f"weights were not transferred within {timeout_s:g} s")
    finally:
        for task in tasks:
            task.cancel()
