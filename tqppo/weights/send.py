"""Sends published weights to engines that cannot read the file: over process groups, or in pieces.

`Sender` runs on the publisher's node as a Ray actor that the rollout pool starts (`ray_sender`), so that the trainer's
own processes take no part. Engines talk to it through `WeightSenderCalls`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import psutil
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from tqppo.errors import EngineError
from tqppo.processes.nodes import num_nodes, own_address
from tqppo.protocols import Bucket, GroupPlace, Member, Offer, Party
from tqppo.weights.file import MODEL_FILE, MappedFile, Place
from tqppo.weights.meeting import Meetings, SendGroup

P = ParamSpec("P")
T = TypeVar("T")


def meeting_place() -> tuple[str, str]:
    """Address and network interface for process groups: loopback, unless Ray spans several nodes."""
    if num_nodes() == 1:
        return "127.0.0.1", "lo"
    address = own_address()
    for interface, found in psutil.net_if_addrs().items():
        if address in {each.address for each in found}:
            return address, interface
    raise EngineError(f"no network interface of this node has its address {address}")


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """A bucket, and the stretch of the file that holds its bytes."""

    bucket: Bucket
    begin: int
    end: int


def plan(places: dict[str, Place], bucket_bytes: int) -> list[BucketBytes]:
    """Cut a file into buckets of one type each, in the file's order, so that each is one stretch of bytes."""
    cuts: list[BucketBytes] = []
    for name, place in places.items():
        dtype = str(place.dtype).removeprefix("torch.")
        last = cuts[-1] if cuts else None
        if (
            last is None
            or last.bucket.dtype != dtype
            or last.end != place.begin
            or place.end - last.begin > bucket_bytes
        ):
            cuts.append(BucketBytes(Bucket([name], dtype, [place.shape]), place.begin, place.end))
            continue
        bucket = Bucket([*last.bucket.names, name], dtype, [*last.bucket.shapes, place.shape])
        cuts[-1] = BucketBytes(bucket, last.begin, place.end)
    return cuts


class Sender:
    """Rank 0 of the process groups with engines. Calls block, so that each engine's come from a thread of its own."""

    def __init__(self) -> None:
        self.host, interface = meeting_place()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        listening = socket.create_server((self.host, 0))  # torch's own would listen on every interface
        self.port: int = listening.getsockname()[1]
        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._meetings = Meetings()

    @property
    def groups(self) -> list[str]:
        """Names of the groups that it is in."""
        return self._meetings.groups

    def offer(self, folder: str, bucket_bytes: int) -> Offer:
        places = MappedFile.open(Path(folder) / MODEL_FILE).places
        return Offer(self.host, self.port, [cut.bucket for cut in plan(places, bucket_bytes)])

    def meet(self, party: Party, member: Member, timeout_s: float) -> GroupPlace:
        return self._meetings.meet(party, member, timeout_s)

    def join(self, party: Party, timeout_s: float) -> None:
        group = self._meetings.of(party).group.result(timeout_s)
        group.joined.do(partial(self._join, group, timeout_s))

    def _join(self, group: SendGroup, timeout_s: float) -> None:
        made, _ = distributed_c10d._new_process_group_helper(
            group.num_ranks,
            0,
            [],
            distributed_c10d.Backend(group.backend),
            PrefixStore(group.name, self._store),
            group_name=cast(Any, group.name),  # a plain string in older versions
            timeout=timedelta(seconds=timeout_s),
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(group.num_ranks)}
        group.process_group = made

    def send(self, party: Party, folder: str, bucket_bytes: int) -> None:
        meeting = self._meetings.of(party)
        meeting.sent.do(partial(self._send, meeting.group.result(0), folder, bucket_bytes))

    def _send(self, group: SendGroup, folder: str, bucket_bytes: int) -> None:
        joined = (
            group.process_group
        )  # this thread holds on to it: where a broken group is let go, its threads are awaited
        if joined is None:
            raise EngineError("the sender is not in the group of these engines: they join a new one first")
        device = torch.device("cuda" if group.backend == "nccl" else "cpu")
        published = MappedFile.open(Path(folder) / MODEL_FILE)
        for cut in plan(published.places, bucket_bytes):
            joined.broadcast(published.stretch(cut.begin, cut.end).to(device), 0).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def leave(self, party: Party, why: str) -> None:
        self._meetings.leave(party, why)

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files in a folder."""
        return {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray:
        return np.fromfile(Path(folder) / name, np.uint8, num_bytes, offset=begin)

    def close(self) -> None:
        self._meetings.close()


class WeightSenderCalls(ABC):
    """The methods of a `protocols.WeightSender`; a subclass says where the sender is."""

    async def offer(self, folder: str, bucket_bytes: int) -> Offer:
        return await self._ask(Sender.offer, folder, bucket_bytes)

    async def meet(self, party: Party, member: Member, timeout_s: float) -> GroupPlace:
        return await self._ask(Sender.meet, party, member, timeout_s)

    async def join(self, party: Party, timeout_s: float) -> None:
        await self._ask(Sender.join, party, timeout_s)

    async def send(self, party: Party, folder: str, bucket_bytes: int) -> None:
        await self._ask(Sender.send, party, folder, bucket_bytes)

    async def leave(self, party: Party, why: str) -> None:
        await self._ask(Sender.leave, party, why)

    async def files(self, folder: str) -> dict[str, int]:
        return await self._ask(Sender.files, folder)

    async def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray:
        return await self._ask(Sender.read, folder, name, begin, num_bytes)

    @abstractmethod
    async def _ask(self, method: Callable[Concatenate[Sender, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Call the sender. Raises `EngineError` if it fails."""


@dataclass(frozen=True)
class SenderClient(WeightSenderCalls):
    """Talks to a sender in this process."""

    sender: Sender

    async def _ask(self, method: Callable[Concatenate[Sender, P], T], *args: P.args, **named: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(method, self.sender, *args, **named)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise failed_to(method, error) from error


def failed_to(method: Callable[..., object], error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error  # it says what happened
    return EngineError(f"the sender of weights failed to {method.__name__}: {type(error).__name__}: {error}")
