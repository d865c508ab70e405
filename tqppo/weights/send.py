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
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from tqppo.errors import EngineError
from tqppo.processes.nodes import num_nodes, own_address
from tqppo.protocols import Bucket, Offer
from tqppo.weights.file import MODEL_FILE, MappedFile, Place

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
    """Rank 0 of one process group per engine. Calls block; different groups may be used from different threads."""

    def __init__(self) -> None:
        self.host, interface = meeting_place()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        listening = socket.create_server((self.host, 0))  # torch's own would listen on every interface
        self.port: int = listening.getsockname()[1]
        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._groups: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}

    def offer(self, folder: str, bucket_bytes: int) -> Offer:
        places = MappedFile.open(Path(folder) / MODEL_FILE).places
        return Offer(self.host, self.port, [cut.bucket for cut in plan(places, bucket_bytes)])

    def join(self, group: str, *, num_ranks: int, backend: str, timeout_s: float) -> None:
        made, _ = distributed_c10d._new_process_group_helper(
            num_ranks,
            0,
            [],
            distributed_c10d.Backend(backend),
            PrefixStore(group, self._store),
            group_name=cast(Any, group),  # a plain string in older versions
            timeout=timedelta(seconds=timeout_s),
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(num_ranks)}
        self._groups[group] = (made, torch.device("cuda" if backend == "nccl" else "cpu"))

    def send(self, group: str, folder: str, bucket_bytes: int) -> None:
        joined, device = self._groups[group]
        published = MappedFile.open(Path(folder) / MODEL_FILE)
        for cut in plan(published.places, bucket_bytes):
            joined.broadcast(published.stretch(cut.begin, cut.end).to(device), 0).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def leave(self, group: str) -> None:
        if group in self._groups:
            dist.destroy_process_group(self._groups.pop(group)[0])

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files in a folder."""
        return {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray:
        return np.fromfile(Path(folder) / name, np.uint8, num_bytes, offset=begin)

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)


class WeightSenderCalls(ABC):
    """The methods of a `protocols.WeightSender`; a subclass says where the sender is."""

    async def offer(self, folder: str, bucket_bytes: int) -> Offer:
        return await self._ask(Sender.offer, folder, bucket_bytes)

    async def join(self, group: str, *, num_ranks: int, backend: str, timeout_s: float) -> None:
        await self._ask(Sender.join, group, num_ranks=num_ranks, backend=backend, timeout_s=timeout_s)

    async def send(self, group: str, folder: str, bucket_bytes: int) -> None:
        await self._ask(Sender.send, group, folder, bucket_bytes)

    async def leave(self, group: str) -> None:
        await self._ask(Sender.leave, group)

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
    return EngineError(f"the sender of weights failed to {method.__name__}: {type(error).__name__}: {error}")
