"""Weights into a server: from a folder that it can open, or over a process group with the publisher's node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from tqppo.errors import EngineError
from tqppo.protocols import WeightSender, WeightSource
from tqppo.weights.identity import check_identity

from .api import CONTROL_TIMEOUT_S, ServerApi
from .group import Rendezvous, WeightGroup, run_both
from .http import EngineServer

BUCKET_BYTES = 256 * 1024**2  # of weights that travel as one piece between nodes
T = TypeVar("T")


class WeightLoader:
    """Loads `source` into a server, and into the next one after a restart."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, api: ServerApi) -> None:
        self._api = api
        self.source: WeightSource | None = None  # None: the weights that the server started with
        self._group: WeightGroup | None = None

    async def restore(self, server: EngineServer) -> None:
        """Load the current weights and check that the server has them."""
        api, source = self._api, self.source
        if source is None:
            return
        label = str(source.version)
        await api.begin_update(server)
        if source.sender is None:
            await api.load_folder(server, source.folder)
        else:
            await self._receive(server, source.folder, source.sender)
        await api.finish_update(server, label)
        found = await api.loaded_label(server)
        if found != label:
            raise EngineError(f"{api.spec.name} has weights {found!r} after loading {label!r}")
        api.weight_label = label
        if source.checksums:
            reports = await api.weight_reports(server)
            if reports is not None:
                check_identity(api.spec.name, source.checksums, reports)

    async def leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.leave()

    async def _receive(self, server: EngineServer, folder: str, sender: WeightSender) -> None:
        """Transfer weights over the process group, which a server joins when it gets its first ones."""
        offer = await _within(sender.offer(folder, self.bucket_bytes), "the offer of weights")
        group = self._group
        if group is None or group.server is not server:
            await self.leave_group()
            on_gpu = self._api.on_gpu
            num_ranks = 1 + (self._api.spec.tensor_parallel if on_gpu else 1)
            rendezvous = Rendezvous.at(offer, num_ranks=num_ranks, on_gpu=on_gpu, timeout_s=CONTROL_TIMEOUT_S)
            group = self._group = WeightGroup(rendezvous.group, sender, server)
            joining = sender.join(
                group.name, num_ranks=num_ranks, backend=rendezvous.backend, timeout_s=rendezvous.timeout_s
            )
            await self._run_both(self._api.join_group(server, rendezvous), joining, CONTROL_TIMEOUT_S)
        sending = sender.send(group.name, folder, self.bucket_bytes)
        receiving = self._api.receive_buckets(server, group.name, offer.buckets)
        await self._run_both(receiving, sending, CONTROL_TIMEOUT_S * max(1, len(offer.buckets)))

    async def _run_both(self, server: Awaitable[None], sender: Awaitable[None], timeout_s: float) -> None:
        try:
            await run_both(server, sender, timeout_s)
        except BaseException:
            await self.leave_group()  # a group in which one rank failed cannot be used again
            raise


async def _within(answer: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(answer, CONTROL_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise EngineError(f"{what} did not come within {CONTROL_TIMEOUT_S:g} s") from None
