"""Published weights for engines that cannot open the file: sent over process groups, or read in pieces.

`Sender` lives on the publisher's node, as a Ray actor that `pool` makes; the trainer's own processes take no part.
`SenderClient` is what engines are given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tqppo.errors import EngineError
from tqppo.protocols import Bucket, Offer
from tqppo.weights.file import DTYPES

FILE = "model.safetensors"


def meeting_place() -> tuple[str, str]:
    """Address and network interface for process groups: loopback, unless Ray spans several nodes."""
    if not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1:
        return "127.0.0.1", "lo"
    address = ray.util.get_node_ip_address()
    for interface, found in psutil.net_if_addrs().items():
        if address in {each.address for each in found}:
            return address, interface
    raise EngineError(f"no network interface of this node has its address {address}")


@dataclass(frozen=True, slots=True)
class Cut:
    """A bucket, and where its bytes are in the file."""

    bucket: Bucket
    begin: int
    end: int


def plan(header: bytes, bucket_bytes: int) -> list[Cut]:
    """The file cut into buckets of one type each, in the file's order, so that each is one stretch of bytes."""
    described = {name: each for name, each in json.loads(header).items() if name != "__metadata__"}
    cuts: list[Cut] = []
    start = 8 + len(header)
    for name, each in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (start + offset for offset in each["data_offsets"])
        dtype = str(DTYPES[each["dtype"]]).removeprefix("torch.")
        last = cuts[-1] if cuts else None
        if last is None or last.bucket.dtype != dtype or last.end != begin or end - last.begin > bucket_bytes:
            cuts.append(Cut(Bucket([name], dtype, [each["shape"]]), begin, end))
            continue
        bucket = Bucket([*last.bucket.names, name], dtype, [*last.bucket.shapes, each["shape"]])
        cuts[-1] = Cut(bucket, last.begin, end)
    return cuts


class Published:
    """A mapped file of weights."""

    def __init__(self, folder: str) -> None:
        with (Path(folder) / FILE).open("rb") as file:
            self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.header = self.content[8 : 8 + int.from_bytes(self.content[:8], "little")]

    def bytes_of(self, cut: Cut) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor do we write to it
            return torch.frombuffer(self.content, dtype=torch.uint8, count=cut.end - cut.begin, offset=cut.begin)


class Sender:
    """Rank 0 of one process group per engine. Calls block; different groups may be used from different threads."""

    def __init__(self) -> None:
        self.host, interface = meeting_place()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        listening = socket.create_server((self.host, 0))  # torch's own would listen on every interface
        self.port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._groups: dict[str, tuple[Any, torch.device]] = {}

    def offer(self, folder: str, bucket_bytes: int) -> Offer:
        return Offer(self.host, self.port, [cut.bucket for cut in plan(Published(folder).header, bucket_bytes)])

    def join(self, group: str, *, num_ranks: int, backend: str, timeout_s: float) -> None:
        made, _ = distributed_c10d._new_process_group_helper(
            num_ranks,
            0,
            [],
            distributed_c10d.Backend(backend),
            dist.PrefixStore(group, self._store),
            group_name=cast(Any, group),  # a plain string in older versions
            timeout=timedelta(seconds=timeout_s),
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(num_ranks)}
        self._groups[group] = (made, torch.device("cuda" if backend == "nccl" else "cpu"))

    def send(self, group: str, folder: str, bucket_bytes: int) -> None:
        joined, device = self._groups[group]
        published = Published(folder)
        for cut in plan(published.header, bucket_bytes):
            joined.broadcast(published.bytes_of(cut).to(device), 0).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def leave(self, group: str) -> None:
        if group in self._groups:
            dist.destroy_process_group(self._groups.pop(group)[0])

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes."""
        return {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray:
        return np.fromfile(Path(folder) / name, np.uint8, num_bytes, offset=begin)

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)


@dataclass(frozen=True, slots=True)
class SenderClient:
    """See `protocols.WeightSender`. Of a sender in this process, or of a Ray actor by its handle."""

    sender: Any

    async def offer(self, folder: str, bucket_bytes: int) -> Offer:
        return await self._ask("offer", folder, bucket_bytes)

    async def join(self, group: str, *, num_ranks: int, backend: str, timeout_s: float) -> None:
        await self._ask("join", group, num_ranks=num_ranks, backend=backend, timeout_s=timeout_s)

    async def send(self, group: str, folder: str, bucket_bytes: int) -> None:
        await self._ask("send", group, folder, bucket_bytes)

    async def leave(self, group: str) -> None:
        await self._ask("leave", group)

    async def files(self, folder: str) -> dict[str, int]:
        return await self._ask("files", folder)

    async def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray:
        return await self._ask("read", folder, name, begin, num_bytes)

    async def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        method = getattr(self.sender, name)
        try:
            if hasattr(method, "remote"):
                return await method.remote(*arguments, **named)
            return await asyncio.to_thread(method, *arguments, **named)
        except (ray.exceptions.RayError, RuntimeError, OSError, KeyError) as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            raise EngineError(f"the sender of weights failed to {name}: {type(cause).__name__}: {cause}") from error


def start_sender(node: str) -> Any:
    """A sender on this Ray node, as an actor. It sees the node's GPUs, but reserves none."""
    placed = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    options = {"num_cpus": 0, "max_concurrency": 64, "max_restarts": 3}
    return ray.remote(Sender).options(**options, scheduling_strategy=placed, runtime_env=environment).remote()


def stop_sender(sender: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(sender)
