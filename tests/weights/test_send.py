"""Weights for engines on other nodes: cut into buckets and sent over a process group."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d

from tqppo.errors import EngineError
from tqppo.protocols import Offer
from tqppo.weights.file import MappedFile
from tqppo.weights.send import Sender, SenderClient, plan


@pytest.fixture
def published(tmp_path: Path) -> Path:
    tensors = {f"layer.{i}": torch.randn(8, i + 1) for i in range(10)}
    tensors |= {"half": torch.randn(6, dtype=torch.bfloat16), "count": torch.arange(3), "one": torch.tensor(5.0)}
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 500, 2**30])
def test_buckets_hold_every_tensor_once_in_stretches_of_one_type(published: Path, bucket_bytes: int) -> None:
    cuts = plan(MappedFile.open(published / "model.safetensors").places, bucket_bytes)
    names = [name for cut in cuts for name in cut.bucket.names]
    assert sorted(names) == sorted(load_file(published / "model.safetensors"))
    assert sum(cut.end - cut.begin for cut in cuts) == cuts[-1].end - cuts[0].begin
    for cut in cuts:
        size = sum(torch.Size(shape).numel() for shape in cut.bucket.shapes) * getattr(torch, cut.bucket.dtype).itemsize
        assert size == cut.end - cut.begin
        assert size <= bucket_bytes or len(cut.bucket.names) == 1
    assert {1: 13, 2**30: 3}.get(bucket_bytes, len(cuts)) == len(cuts)


def receive(offer: Offer, group: str, found: dict[str, torch.Tensor]) -> None:
    """Receive as an engine does, as rank 1."""
    timeout = timedelta(seconds=30)
    store = dist.TCPStore(offer.host, offer.port, is_master=False, wait_for_workers=False, timeout=timeout)
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group}/", dist.PrefixStore(group, store)))
    joined = dist.ProcessGroupGloo(prefixed, 1, 2, timeout)
    for bucket in offer.buckets:
        dtype = getattr(torch, bucket.dtype)
        sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
        flat = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8)
        joined.broadcast(flat, 0).wait()
        for name, part, shape in zip(bucket.names, flat.view(dtype).split(sizes), bucket.shapes, strict=True):
            found[name] = part.view(shape)


def test_what_is_received_over_a_group_is_what_was_published(published: Path, sender: Sender) -> None:
    offer, found = sender.offer(str(published), 500), {}
    receiver = threading.Thread(target=receive, args=(offer, "g", found))
    receiver.start()
    sender.join("g", num_ranks=2, backend="gloo", timeout_s=30)
    sender.send("g", str(published), 500)
    receiver.join(30)
    expected = load_file(published / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    sender.leave("g")
    sender.leave("g")  # a second time does nothing
    assert not distributed_c10d._world.pg_map, "nothing of the group is left"


def test_on_one_node_the_sender_listens_on_loopback_only(sender: Sender) -> None:
    assert sender.host == "127.0.0.1"
    listening = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening if each.laddr.port == sender.port} == {"127.0.0.1"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    socket.create_connection((sender.host, sender.port), 5).close()


def test_a_sender_that_fails_is_an_engine_error_with_its_reason(sender: Sender, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"failed to offer.*nothing-here"):
        asyncio.run(SenderClient(sender).offer(str(tmp_path / "nothing-here"), 1))
    with pytest.raises(EngineError, match="failed to send"):
        asyncio.run(SenderClient(sender).send("never-joined", str(tmp_path), 1))
