"""The ranks of one role: the place of this one, their process group, and the few numbers that they exchange."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

BACKLOG = 4096  # ranks that connect at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place. A single rank needs no process group, unless FSDP casts its computation.

    Rows go to groups of `context` neighbours, which compute each row together.
    """

    rank: int = 0
    size: int = 1
    context: int = 1

    @property
    def place(self) -> int:
        """Among the ranks that compute the same rows."""
        return self.rank % self.context

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every group of ranks with the same rows, which all have the same numbers; one collective."""
        if self.size == 1:
            return [list(numbers)]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        everyone = mine.new_empty(self.size * len(mine))
        dist.all_gather_into_tensor(everyone, mine)
        return everyone.view(self.size, -1)[:: self.context].tolist()

    def barrier(self) -> None:
        self.gather([0.0])


def open_store(host: str) -> TCPStore:
    """Open the store through which ranks find rank 0, on a free port (`store.port`) of this address.

    torch itself would listen on every interface, and answer anyone who connects.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join(ranks: Ranks, device: torch.device, store: Store, *, timeout_s: float, is_one_node: bool) -> None:
    """Form the process group: gloo on CPUs, nccl on GPUs."""
    if is_one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names of laptops often resolve to nothing
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=timeout_s)
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
