"""Weights into a server: from a folder that it can open, or over a process group with the publisher's node."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from tqppo.errors import EngineError, TqppoError
from tqppo.protocols import GroupPlace, Member, Offer, Party, WeightSender, WeightSource
from tqppo.weights.identity import check_identity

from .api import CONTROL_TIMEOUT_S, ServerApi
from .group import Rendezvous, run_both
from .http import EngineServer

BUCKET_BYTES = 256 * 1024**2  # of weights that travel as one piece between nodes
T = TypeVar("T")


class WeightLoader:
    """Loads `source` into a server, and into the next one after a restart."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, api: ServerApi) -> None:
        self._api = api
        self.source: WeightSource | None = None  # None: the weights that the server started with

    async def load(self, server: EngineServer, source: WeightSource) -> None:
        """Load new weights, together with the other engines of the source's party, and check that they are there."""
        self.source = source
        await self._load(server, source, source.party or self._alone())

    async def restore(self, server: EngineServer) -> None:
        """Load the current weights into a server that has just started. The other engines have them already."""
        if self.source is not None:
            await self._load(server, self.source, self._alone())

    def _alone(self) -> Party:
        name = self._api.spec.name
        return Party(f"{name}-{secrets.token_hex(8)}", (name,))

    async def _load(self, server: EngineServer, source: WeightSource, party: Party) -> None:
        api, label = self._api, str(source.version)
        if source.sender is None:
            await api.begin_update(server)
            await api.load_folder(server, source.folder)
        else:
            transfer = Transfer(api, server, source.sender, party, source.folder, self.bucket_bytes)
            await transfer.run()
        await api.finish_update(server, label)
        found = await api.loaded_label(server)
        if found != label:
            raise EngineError(f"{api.spec.name} has weights {found!r} after loading {label!r}")
        api.weight_label = label
        if source.checksums:
            reports = await api.weight_reports(server)
            if reports is not None:
                check_identity(api.spec.name, source.checksums, reports)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One version of the weights on its way over a process group, to this server and those of the party's others."""

    api: ServerApi
    server: EngineServer
    sender: WeightSender
    party: Party
    folder: str
    bucket_bytes: int

    async def run(self) -> None:
        try:
            await self._run()
        except BaseException as error:
            with contextlib.suppress(TqppoError):  # the others need not wait for this server
                await self.sender.leave(self.party, f"{self.api.spec.name} failed to get the weights: {error!s:.2000}")
            raise

    async def _run(self) -> None:
        spec, api = self.api.spec, self.api
        offer = await _within(self.sender.offer(self.folder, self.bucket_bytes), "the offer of weights")
        num_ranks = spec.tensor_parallel if api.on_gpu else 1
        member = Member(spec.name, self.server.identity, num_ranks, "nccl" if api.on_gpu else "gloo")
        # Another engine may have to start again first, or to finish its requests.
        patience_s = spec.start_timeout_s + spec.request_timeout_s
        place = await self.sender.meet(self.party, member, patience_s)
        if place.is_new:
            await self._join(offer, place, member)
        await api.begin_update(self.server)
        sending = self.sender.send(self.party, self.folder, self.bucket_bytes)
        receiving = api.receive_buckets(self.server, place.group, offer.buckets)
        await run_both(receiving, sending, CONTROL_TIMEOUT_S * max(1, len(offer.buckets)))

    async def _join(self, offer: Offer, place: GroupPlace, member: Member) -> None:
        rendezvous = Rendezvous.at(offer, place, backend=member.backend, timeout_s=CONTROL_TIMEOUT_S)
        joining = self.sender.join(self.party, CONTROL_TIMEOUT_S)
        await run_both(self.api.join_group(self.server, rendezvous), joining, CONTROL_TIMEOUT_S)


async def _within(answer: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(answer, CONTROL_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise EngineError(f"{what} did not come within {CONTROL_TIMEOUT_S:g} s") from None
