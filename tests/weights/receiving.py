"""Engines that receive weights over a process group, as the sender sees them, without a server around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tqppo.protocols import GroupPlace, Member, Offer, Party
from tqppo.weights.send import Sender

ENGINES = ("rollout-0", "rollout-1", "rollout-2")
LIMIT_S = 30.0


def member(engine: str, server: str = "first", num_ranks: int = 1) -> Member:
    return Member(engine, server, num_ranks, "gloo")


@contextmanager
def open_sender() -> Iterator[Sender]:
    """A sender. Its threads are awaited, because a process cannot end in the middle of a collective."""
    before, made = set(threading.enumerate()), Sender()
    yield made
    made.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)


class Receiver:
    """Takes part as an engine with one process does."""

    def __init__(self, sender: Sender, engine: str, server: str = "first", limit_s: float = LIMIT_S) -> None:
        self.sender, self.member, self.limit_s = sender, member(engine, server), limit_s
        self.group: dist.ProcessGroupGloo | None = None

    def take(self, party: Party, folder: Path, bucket_bytes: int = 500) -> dict[str, torch.Tensor]:
        offer = self.sender.offer(str(folder), bucket_bytes)
        place = self.sender.meet(party, self.member, LIMIT_S)
        with ThreadPoolExecutor(1) as other:
            if place.is_new:
                joining = other.submit(self.sender.join, party, self.limit_s)
                self.join(offer, place)
                joining.result(LIMIT_S)
            sending = other.submit(self.sender.send, party, str(folder), bucket_bytes)
            found = self.receive(offer)
            sending.result(LIMIT_S)
        return found

    def join(self, offer: Offer, place: GroupPlace) -> None:
        timeout = timedelta(seconds=self.limit_s)
        store = dist.TCPStore(offer.host, offer.port, is_master=False, wait_for_workers=False, timeout=timeout)
        name = place.group
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.group = dist.ProcessGroupGloo(prefixed, place.first_rank, place.num_ranks, timeout)

    def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        assert self.group is not None
        for bucket in offer.buckets:
            dtype = getattr(torch, bucket.dtype)
            sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
            flat = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8)
            self.group.broadcast(flat, 0).wait()
            for name, part, shape in zip(bucket.names, flat.view(dtype).split(sizes), bucket.shapes, strict=True):
                found[name] = part.view(shape)
        return found
