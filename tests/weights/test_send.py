"""Weights for engines on other nodes: cut into buckets and sent over a process group."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d

from tests.weights.receiving import ENGINES, LIMIT_S, Receiver, member, open_sender
from tqppo.errors import EngineError, PeerFailed
from tqppo.protocols import Member, Party
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
    with open_sender() as made:
        yield made


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


def together(
    receivers: Sequence[Receiver], name: str, folder: Path, bucket_bytes: int = 500
) -> list[dict[str, torch.Tensor]]:
    """All receivers take the same weights at the same time."""
    party = Party(name, tuple(each.member.engine for each in receivers))
    with ThreadPoolExecutor(len(receivers)) as threads:
        return list(threads.map(lambda each: each.take(party, folder, bucket_bytes), receivers))


def test_three_engines_receive_what_was_published_and_each_byte_is_sent_once(
    published: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    broadcast = dist.ProcessGroup.broadcast

    def counted(group: dist.ProcessGroup, tensor: torch.Tensor, *rest: object) -> object:
        sent.append(tensor.nbytes)
        return broadcast(group, tensor, *rest)

    monkeypatch.setattr(dist.ProcessGroup, "broadcast", counted)
    expected = load_file(published / "model.safetensors")
    receivers = [Receiver(sender, engine) for engine in ENGINES]
    for version in ("v1", "v2"):
        for found in together(receivers, version, published):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert sum(sent) == 2 * size, "two versions, not six"
    assert len(sender.groups) == 1, "the group of the first version is used for the second"
    sender.close()
    assert not distributed_c10d._world.pg_map, "nothing of the group is left"


def test_an_engine_with_a_new_server_gets_weights_alone_and_then_with_the_others(
    published: Path, sender: Sender
) -> None:
    receivers = [Receiver(sender, engine) for engine in ENGINES]
    together(receivers, "v1", published)
    (first,) = sender.groups
    receivers[1] = Receiver(sender, "rollout-1", "second")
    together(receivers[1:2], "alone", published)
    (alone,) = sender.groups
    assert alone != first, "the server of the first group is gone, and the group with it"
    found = together(receivers, "v2", published)
    assert all(len(each) == len(load_file(published / "model.safetensors")) for each in found)
    assert len(sender.groups) == 1
    assert alone not in sender.groups


def test_a_party_that_is_incomplete_at_the_deadline_is_named(sender: Sender) -> None:
    party = Party("v1", ENGINES)
    pattern = r"rollout-2 did not come for the weights within 0\.3 s; rollout-0, rollout-1 waited"
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(sender.meet, party, member(engine), 0.3) for engine in ENGINES[:2]]
        for each in waiting:
            with pytest.raises(EngineError, match=pattern):
                each.result(LIMIT_S)
    with pytest.raises(EngineError, match=pattern):
        sender.meet(party, member("rollout-2"), LIMIT_S)  # it came too late, and does not wait in vain


@pytest.mark.parametrize("when", ["waiting", "joining", "receiving"])
def test_when_one_engine_fails_the_others_learn_which_at_once(
    published: Path, sender: Sender, tmp_path: Path, when: str
) -> None:
    party = Party("v1", ENGINES)
    receivers = [Receiver(sender, engine, limit_s=8.0) for engine in ENGINES]
    save_file({"wide": torch.zeros(2**24)}, tmp_path / "model.safetensors")  # more than the sockets' buffers hold
    if when == "receiving":
        together(receivers, "v0", published)

    def take_part(each: Receiver) -> None:
        """The sender's part; an engine's own has a deadline of its own."""
        place = sender.meet(party, each.member, LIMIT_S)
        if place.is_new:
            sender.join(party, each.limit_s)
        sender.send(party, str(tmp_path), 500)

    began = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        waiting = receivers[:2] if when == "waiting" else receivers
        others = [threads.submit(take_part, each) for each in waiting]
        time.sleep(0.3)  # they are in the middle of it
        sender.leave(party, "rollout-2 failed to get the weights: it is out of memory")
        for each in others:
            with pytest.raises(PeerFailed, match="rollout-2 failed to get the weights: it is out of memory"):
                each.result(LIMIT_S)
    assert time.monotonic() - began < 6.0
    assert not sender.groups, "a group in which one failed is not used again"


def test_engines_on_gpus_and_cpus_cannot_share_a_group(sender: Sender) -> None:
    party = Party("v1", ("a", "b"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sender.meet, party, member("a"), LIMIT_S)
        with pytest.raises(EngineError, match="cannot use gloo and nccl"):
            sender.meet(party, Member("b", "first", 1, "nccl"), LIMIT_S)
        with pytest.raises(EngineError, match="a: gloo, b: nccl"):
            waiting.result(LIMIT_S)


def test_the_ranks_of_engines_follow_each_other(sender: Sender) -> None:
    party = Party("v1", ("a", "b", "c"))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(sender.meet, party, member(name, num_ranks=2), LIMIT_S) for name in "ab"]
        last = sender.meet(party, member("c", num_ranks=2), LIMIT_S)
        places = [*(each.result(LIMIT_S) for each in waiting), last]
    assert [(place.first_rank, place.num_ranks) for place in places] == [(1, 7), (3, 7), (5, 7)]


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
        asyncio.run(SenderClient(sender).send(Party("nobody", ()), str(tmp_path), 1))
