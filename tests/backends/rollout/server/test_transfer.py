"""Weights over one process group to several engines: what each engine's loader does, with a real sender and gloo."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.weights.receiving import ENGINES, LIMIT_S, Receiver, open_sender
from tqppo.errors import EngineError, PeerFailed
from tqppo.protocols import Bucket, EngineSpec, GroupPlace, Offer, Party, WeightSource
from tqppo.weights.send import Sender, SenderClient

weights: Any = importlib.import_module("tqppo_backends.rollout.server.weights")


@dataclass
class Server:
    """As much of `EngineServer` as the loader sees."""

    identity: str


class Api:
    """The server's side of a transfer, in threads of this process."""

    on_gpu = False

    def __init__(self, name: str, sender: Sender) -> None:
        self.spec = EngineSpec("model", 64, name=name, start_timeout_s=LIMIT_S, request_timeout_s=1.0)
        self.receiver = Receiver(sender, name, limit_s=5.0)  # its thread ends then, if the others do not come
        self.offer: Offer | None = None
        self.got: dict[str, torch.Tensor] = {}
        self.steps: list[str] = []
        self.fails_at = ""

    def note(self, step: str) -> None:
        self.steps.append(step)
        if self.fails_at == step:
            raise EngineError(f"{step} was refused: no such route")

    async def begin_update(self, server: Server) -> None:
        self.note("begin")

    async def join_group(self, server: Server, rendezvous: Any) -> None:
        self.note("join")
        offer = Offer(rendezvous.host, rendezvous.port, [])
        place = GroupPlace(rendezvous.group, rendezvous.first_rank, rendezvous.num_ranks, is_new=True)
        await asyncio.to_thread(self.receiver.join, offer, place)

    async def receive_buckets(self, server: Server, group: str, buckets: Sequence[Bucket]) -> None:
        self.note("receive")
        self.got = await asyncio.to_thread(self.receiver.receive, Offer("", 0, list(buckets)))

    async def finish_update(self, server: Server, label: str) -> None:
        self.note("finish")
        self.label = label

    async def loaded_label(self, server: Server) -> str:
        return self.label


@dataclass
class World:
    sender: Sender
    folder: Path
    apis: list[Api] = field(init=False)
    loaders: list[Any] = field(init=False)
    servers: list[Server] = field(init=False)

    def __post_init__(self) -> None:
        self.apis = [Api(name, self.sender) for name in ENGINES]
        self.loaders = [weights.WeightLoader(api) for api in self.apis]
        self.servers = [Server(f"first-{name}") for name in ENGINES]

    def publish(self, version: int) -> WeightSource:
        folder = self.folder / f"v{version}"
        folder.mkdir()
        save_file({"a": torch.full((8, 4), float(version)), "b": torch.arange(9)}, folder / "model.safetensors")
        return WeightSource(str(folder), version, sender=SenderClient(self.sender), party=Party(f"v{version}", ENGINES))

    async def load(self, source: WeightSource) -> list[BaseException | None]:
        calls = [loader.load(server, source) for loader, server in zip(self.loaders, self.servers, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    def versions(self) -> list[float]:
        return [float(api.got["a"].mean()) for api in self.apis]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_sender() as sender:
        yield World(sender, tmp_path)


def test_all_engines_of_a_party_join_once_and_get_every_version(world: World) -> None:
    async def whole() -> None:
        for version in (1, 2, 3):
            assert await world.load(world.publish(version)) == [None] * 3
            assert world.versions() == [version] * 3

    asyncio.run(whole())
    assert all(api.steps.count("join") == 1 for api in world.apis)
    assert len(world.sender.groups) == 1


def test_a_server_that_starts_again_gets_the_weights_alone(world: World) -> None:
    async def whole() -> None:
        await world.load(world.publish(1))
        world.servers[2] = Server("second")
        world.apis[2].got = {}
        await world.loaders[2].restore(world.servers[2])  # the others take no part
        assert world.versions() == [1, 1, 1]
        assert await world.load(world.publish(2)) == [None] * 3  # all of them again
        assert world.versions() == [2, 2, 2]

    asyncio.run(whole())
    assert [api.steps.count("join") for api in world.apis] == [2, 2, 3]


@pytest.mark.parametrize("step", ["join", "begin", "receive"])
def test_the_failure_of_one_engine_reaches_the_others_with_its_name_and_reason(
    world: World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("tqppo_backends.rollout.server.group"), "REASON_S", 0.2)
    monkeypatch.setattr(weights, "CONTROL_TIMEOUT_S", 5.0)

    async def whole() -> list[BaseException | None]:
        if step != "join":
            await world.load(world.publish(1))
        world.apis[1].fails_at = step
        found = await asyncio.wait_for(world.load(world.publish(2)), LIMIT_S / 2)
        world.apis[1].fails_at = ""
        return found

    first, second, third = asyncio.run(whole())
    assert str(second) == f"{step} was refused: no such route"
    for other in (first, third):
        assert other is None or isinstance(other, PeerFailed)  # None: it had all of it before the other failed
        assert other is None or str(other) == f"rollout-1 failed to get the weights: {second}"
    assert isinstance(first, PeerFailed) or isinstance(third, PeerFailed)
    assert not world.sender.groups


def test_an_engine_that_never_comes_is_named_with_the_deadline(world: World) -> None:
    source = world.publish(1)
    for api in world.apis:
        api.spec = replace(api.spec, start_timeout_s=0.2, request_timeout_s=0.3)

    async def whole() -> list[BaseException | None]:
        calls = [loader.load(server, source) for loader, server in zip(world.loaders[:2], world.servers, strict=False)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(whole()):
        assert isinstance(error, EngineError)
        assert "rollout-2 did not come for the weights within 0.5 s" in str(error)
    assert all(api.steps == [] for api in world.apis), "no server was disturbed"
