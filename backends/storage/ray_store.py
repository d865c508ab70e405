"""RayStorage: blocks as Ray objects, held by an actor of their node so that a producer's death loses nothing.

The producer puts a block once and owns its objects; the actor maps them, which holds their memory whatever becomes of
the producer, and puts them anew as its own should the owner not answer. Small columns of a block share objects, a wide
column has its own, so that a reader on another node fetches little more than it asks for; a small block stays in the
actor itself. Ray's memory is read-only, and a write to it would end the process: readers get copies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from tqppo.errors import BackendError, DataLost
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.blocks.block import Block, BlockView, Bytes, Layout, parse
from tqppo.queue.link.calls import NoPulse, Remote, Silence

from .nodes import NodeActor, NodeActors, this_node, who

log = logging.getLogger(__name__)

SMALL = 64 << 10  # bytes of a block that is not worth objects of its own
WIDE = 24 << 20  # bytes; what is larger has an object of its own: every object costs messages, every byte a transfer
OWNER_S = 10.0  # without the objects for this long, their owner counts as lost

Found = tuple[bytes, list[tuple[list[int], Any]]]  # header, then where pieces start and what holds them


class RayStorage:
    def __init__(self, spec: StorageSpec) -> None:
        if not spec.distributed:
            raise BackendError("storage 'ray' needs Ray; use storage 'simple' for a queue in one process")
        self.spec = spec
        self._keepers = NodeActors(spec)
        self._node = ""

    async def start(self, node: str) -> None:
        await self._keepers.start(node, Keeper, self.spec.timeout_s)
        _warn_of_small_store(node, self.spec.budget_bytes)

    async def write(self, block: Block) -> Locator:
        name, header, pieces = block.layout.block, block.layout.header, dict(block.pieces[1:])
        if block.num_bytes <= SMALL:
            await self._keepers.ask(self.node, "keep_small", name, header, pieces)
        else:
            groups = _grouped(pieces)
            refs = [ray.put([pieces[start] for start in group]) for group in groups]
            await self._keepers.ask(self.node, "keep", name, header, groups, refs)
        return Locator(self.node, name, block.num_bytes)

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        found = await self._ask_all("find", locators, columns)
        try:
            objects = await self._fetched(found, locators, OWNER_S)
        except NoPulse:
            raise
        except (DataLost, Silence):  # the owner is dead, or does not answer
            found = await self._ask_all("adopt", locators, columns)
            objects = await self._fetched(found, locators, self.spec.timeout_s)
        return [None if each is None else _view(each, objects) for each in found]

    async def _ask_all(
        self, method: str, locators: Sequence[Locator], columns: Sequence[str] | None
    ) -> list[Found | None]:
        """The actors' answers about blocks, one request per node."""
        answers: list[Found | None] = [None] * len(locators)
        places = {node: [i for i, each in enumerate(locators) if each.node == node] for node in _nodes(locators)}
        replies = {
            node: self._keepers.ask(node, method, [locators[i].block for i in here], columns)
            for node, here in places.items()
        }
        for node, here in places.items():
            for i, answer in zip(here, await replies[node], strict=True):
                answers[i] = answer
        return answers

    async def _fetched(
        self, found: Sequence[Found | None], locators: Sequence[Locator], timeout_s: float
    ) -> dict[Any, list[Bytes]]:
        """The objects among what was found."""
        refs = [held for each in found if each for _, held in each[1] if isinstance(held, ray.ObjectRef)]
        if not refs:
            return {}
        nodes = _nodes(locators)
        pulses = [self._keepers.pulse(node) for node in nodes]
        got = await Remote(refs, who(", ".join(nodes)), min(timeout_s, self.spec.timeout_s), pulses)
        return dict(zip(refs, got, strict=True))

    def free(self, locators: Sequence[Locator]) -> None:
        for node in _nodes(locators):
            self._keepers.of(node).drop.remote([locator.block for locator in locators if locator.node == node])

    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None:
        blocks = {locator.block for locator in known}
        for node in self._keepers.nodes():
            self._keepers.of(node).sweep.remote(blocks, older_than_s)

    async def close(self) -> None:
        await self._keepers.close()

    @property
    def node(self) -> str:
        self._node = self._node or this_node()
        return self._node


@dataclass(slots=True)
class Part:
    """Neighbouring pieces of a block: where they start, their bytes, and the object with them, if they have one."""

    starts: list[int]
    arrays: list[Bytes]
    ref: Any = None
    is_ours: bool = True

    def adopt(self) -> None:
        if not self.is_ours:
            self.ref, self.is_ours = ray.put(self.arrays), True
            self.arrays = []  # the old object may go


@dataclass(frozen=True, slots=True)
class Kept:
    layout: Layout
    parts: list[Part]
    kept_at: float

    def having(self, columns: Sequence[str] | None) -> list[Part]:
        """The parts with something of these columns."""
        needed = {start for start, _ in self.layout.pieces(columns)}
        return [part for part in self.parts if not needed.isdisjoint(part.starts)]


class Keeper(NodeActor):
    """The actor of a node: whatever it holds is there as long as it lives."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._kept: dict[str, Kept] = {}
        self._adopting = threading.Lock()

    def keep(self, block: str, header: bytes, groups: list[list[int]], refs: list[Any]) -> None:
        held = ray.get(refs, timeout=self._timeout_s)  # mapped: while these arrays live, so does their memory
        parts = [Part(*part, is_ours=False) for part in zip(groups, held, refs, strict=True)]
        self._kept[block] = Kept(parse(header), parts, time.monotonic())

    def keep_small(self, block: str, header: bytes, pieces: Mapping[int, Bytes]) -> None:
        part = Part(list(pieces), [piece.copy() for piece in pieces.values()])
        self._kept[block] = Kept(parse(header), [part], time.monotonic())

    def find(self, blocks: Sequence[str], columns: Sequence[str] | None) -> list[Found | None]:
        return [_found(self._kept.get(block), columns) for block in blocks]

    def adopt(self, blocks: Sequence[str], columns: Sequence[str] | None) -> list[Found | None]:
        """Find blocks, in objects that are ours."""
        with self._adopting:
            for kept in [self._kept[block] for block in blocks if block in self._kept]:
                for part in kept.having(columns):
                    part.adopt()
        return self.find(blocks, columns)

    def drop(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            self._kept.pop(block, None)

    def sweep(self, known: Collection[str], older_than_s: float) -> None:
        old = time.monotonic() - older_than_s
        self.drop([name for name, kept in list(self._kept.items()) if kept.kept_at < old and name not in known])

    def close(self) -> None:
        self._kept.clear()


def _found(kept: Kept | None, columns: Sequence[str] | None) -> Found | None:
    if kept is None:
        return None
    parts = kept.having(columns)
    return kept.layout.header, [(part.starts, part.arrays if part.ref is None else part.ref) for part in parts]


def _view(found: Found, objects: Mapping[Any, list[Bytes]]) -> BlockView:
    header, parts = found
    pieces: dict[int, Bytes] = {}
    for starts, held in parts:
        pieces.update(zip(starts, objects[held] if isinstance(held, ray.ObjectRef) else held, strict=True))
    return BlockView(parse(header), pieces=pieces, writable=False)


def _nodes(locators: Sequence[Locator]) -> list[str]:
    return list(dict.fromkeys(locator.node for locator in locators))


def _grouped(pieces: Mapping[int, Bytes]) -> list[list[int]]:
    """Pieces by object: neighbours together while they are small."""
    groups: list[list[int]] = [[]]
    size = 0
    for start, piece in pieces.items():
        if groups[-1] and size + piece.nbytes > WIDE:
            groups.append([])
            size = 0
        groups[-1].append(start)
        size += piece.nbytes
    return groups


def _warn_of_small_store(node: str, budget_bytes: int) -> None:
    """A full object store goes to disk instead of pushing back, so the budget should fit into it."""
    for each in ray.nodes():
        size = int(each["Resources"].get("object_store_memory", 0))
        if each["NodeID"] == node and size < budget_bytes:
            log.warning(
                "storage.budget_gb allows %d MB on node %s, but its Ray object store has %d MB; the rest goes to disk",
                budget_bytes >> 20, node, size >> 20,
            )  # fmt: skip
