"""RayStorage: blocks as Ray objects, held by an actor of their node so that a producer's death loses nothing.

The producer puts a block once and owns its objects. The actor maps them, which keeps their memory even if the producer
dies; if the producer does not answer, the actor puts the objects again as its own. Small columns of a block share an
object, a wide column has its own, so that a reader on another node fetches little more than it asks for. A small block
stays in the actor itself. Ray's memory is read-only and a write to it would end the process, so readers get copies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from tqppo.errors import BackendError, DataLost
from tqppo.processes.ray_calls import this_node
from tqppo.queue.blocks.block import Block, BlockView, Bytes, Layout, parse
from tqppo.queue.link.calls import NoAnswer, Unresponsive
from tqppo.queue.link.replies import RayReply
from tqppo.queue.storage import Locator, RowRequest, StorageSpec

from .nodes import NodeActor, NodeActors, describe
from .rows import Pieces, by_node, excerpt_pieces, opened

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 10  # a block up to this size is kept in the actor, because objects would cost more
OBJECT_BYTES = 24 << 20  # of one object: fewer objects cost fewer messages, smaller ones transfer fewer bytes
OWNER_TIMEOUT_S = 10.0  # after that, the owner of the objects counts as dead

Ref = Any  # a ray.ObjectRef, whose type Ray's stubs leave open
Found = tuple[
    bytes, list[tuple[list[int], Ref | list[Bytes]]]
]  # header; per part, where its pieces start and their data

Find = Callable[["ObjectKeeper", Sequence[str], Sequence[str] | None], list[Found | None]]


class RayStorage:
    def __init__(self, spec: StorageSpec) -> None:
        if not spec.distributed:
            raise BackendError("storage 'ray' needs Ray; use storage 'simple' for a queue in one process")
        self.spec = spec
        self._keepers = NodeActors(spec)
        self._node = ""

    async def start(self, node: str) -> None:
        await self._keepers.start(node, ObjectKeeper, self.spec.timeout_s)
        _warn_of_small_store(node, self.spec.budget_bytes)

    async def write(self, block: Block) -> Locator:
        name, header, pieces = block.layout.block, block.layout.header, dict(block.pieces[1:])
        if block.num_bytes <= SMALL_BYTES:
            await self._keepers.ask(self.node, ObjectKeeper.keep_small, name, header, pieces)
        else:
            groups = _grouped(pieces)
            refs = [ray.put([pieces[start] for start in group]) for group in groups]
            await self._keepers.ask(self.node, ObjectKeeper.keep, name, header, groups, refs)
        return Locator(self.node, name, block.num_bytes)

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        found = await self._ask_all(ObjectKeeper.find, locators, columns)
        try:
            objects = await self._fetched(found, locators, OWNER_TIMEOUT_S)
        except Unresponsive:
            raise
        except (DataLost, NoAnswer):  # the owner of the objects is dead, or does not answer
            found = await self._ask_all(ObjectKeeper.adopt, locators, columns)
            objects = await self._fetched(found, locators, self.spec.timeout_s)
        return [None if each is None else _view(each, objects) for each in found]

    async def read_rows(self, requests: Sequence[RowRequest]) -> list[BlockView | None]:
        found: list[BlockView | None] = [None] * len(requests)
        places = by_node(requests)
        replies = {
            node: self._keepers.ask(
                node, ObjectKeeper.read_rows,
                [(requests[i].locator.block, requests[i].columns, requests[i].rows) for i in here],
            )
            for node, here in places.items()
        }  # fmt: skip
        for node, here in places.items():
            for i, sent in zip(here, await replies[node], strict=True):
                found[i] = opened(sent)
        return found

    async def _ask_all(
        self, method: Find, locators: Sequence[Locator], columns: Sequence[str] | None
    ) -> list[Found | None]:
        """Ask the actors for blocks, with one request per node."""
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
    ) -> dict[Ref, list[Bytes]]:
        """The contents of all objects among what was found, by reference."""
        refs = [held for each in found if each for _, held in each[1] if isinstance(held, ray.ObjectRef)]
        if not refs:
            return {}
        nodes = _nodes(locators)
        heartbeats = [self._keepers.heartbeat(node) for node in nodes]
        reply: RayReply[list[list[Bytes]]] = RayReply(
            refs, describe(", ".join(nodes)), min(timeout_s, self.spec.timeout_s), heartbeats
        )
        return dict(zip(refs, await reply, strict=True))

    def free(self, locators: Sequence[Locator]) -> None:
        for node in _nodes(locators):
            blocks = [locator.block for locator in locators if locator.node == node]
            self._keepers.tell(node, ObjectKeeper.drop, blocks)

    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None:
        blocks = {locator.block for locator in known}
        for node in self._keepers.nodes():
            self._keepers.tell(node, ObjectKeeper.sweep, blocks, older_than_s)

    async def close(self) -> None:
        await self._keepers.close()

    @property
    def node(self) -> str:
        self._node = self._node or this_node()
        return self._node


@dataclass(slots=True)
class Part:
    """Adjacent pieces of a block: where they start, their bytes, and the object that holds them, if there is one."""

    starts: list[int]
    arrays: list[Bytes]
    ref: Ref = None
    is_own: bool = True

    def bytes_here(self, timeout_s: float) -> list[Bytes]:
        """The bytes of the pieces; those of an object of this process are mapped again."""
        arrays = self.arrays  # another thread may adopt them meanwhile
        return arrays if arrays or self.ref is None else ray.get(self.ref, timeout=timeout_s)

    def adopt(self) -> None:
        """Put the bytes again as an object of this process."""
        if not self.is_own:
            self.ref, self.is_own = ray.put(self.arrays), True
            self.arrays = []  # releases the old object


@dataclass(frozen=True, slots=True)
class HeldBlock:
    layout: Layout
    parts: list[Part]
    since: float

    def parts_of(self, columns: Sequence[str] | None) -> list[Part]:
        """The parts that hold any piece of these columns."""
        needed = {start for start, _ in self.layout.pieces(columns)}
        return [part for part in self.parts if not needed.isdisjoint(part.starts)]


class ObjectKeeper(NodeActor):
    """The storage actor of a node. The blocks that it holds exist as long as it lives."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[str, HeldBlock] = {}
        self._adopting = threading.Lock()

    def keep(self, block: str, header: bytes, groups: list[list[int]], refs: list[Ref]) -> None:
        arrays = ray.get(
            refs, timeout=self._timeout_s
        )  # mapped; the arrays keep the memory even if the objects' owner dies
        parts = [Part(*part, is_own=False) for part in zip(groups, arrays, refs, strict=True)]
        self._held[block] = HeldBlock(parse(header), parts, time.monotonic())

    def keep_small(self, block: str, header: bytes, pieces: Mapping[int, Bytes]) -> None:
        part = Part(list(pieces), [piece.copy() for piece in pieces.values()])
        self._held[block] = HeldBlock(parse(header), [part], time.monotonic())

    def find(self, blocks: Sequence[str], columns: Sequence[str] | None) -> list[Found | None]:
        return [_found(self._held.get(block), columns) for block in blocks]

    def read_rows(self, requests: Sequence[tuple[str, Sequence[str], np.ndarray]]) -> list[Pieces | None]:
        return [self._excerpt(self._held.get(block), columns, rows) for block, columns, rows in requests]

    def _excerpt(self, held: HeldBlock | None, columns: Sequence[str], rows: np.ndarray) -> Pieces | None:
        if held is None:
            return None
        pieces: dict[int, Bytes] = {}
        for part in held.parts_of(columns):
            pieces.update(zip(part.starts, part.bytes_here(self._timeout_s), strict=True))
        return excerpt_pieces(BlockView(held.layout, pieces=pieces, writable=True), columns, rows)

    def adopt(self, blocks: Sequence[str], columns: Sequence[str] | None) -> list[Found | None]:
        """Find blocks, after putting them again as objects of this actor."""
        with self._adopting:
            for held in [self._held[block] for block in blocks if block in self._held]:
                for part in held.parts_of(columns):
                    part.adopt()
        return self.find(blocks, columns)

    def drop(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            self._held.pop(block, None)

    def sweep(self, known: Collection[str], older_than_s: float) -> None:
        old = time.monotonic() - older_than_s
        self.drop([name for name, held in list(self._held.items()) if held.since < old and name not in known])

    def close(self) -> None:
        self._held.clear()


def _found(held: HeldBlock | None, columns: Sequence[str] | None) -> Found | None:
    if held is None:
        return None
    parts = held.parts_of(columns)
    return held.layout.header, [(part.starts, part.arrays if part.ref is None else part.ref) for part in parts]


def _view(found: Found, objects: Mapping[Ref, list[Bytes]]) -> BlockView:
    header, parts = found
    pieces: dict[int, Bytes] = {}
    for starts, held in parts:
        pieces.update(zip(starts, objects[held] if isinstance(held, ray.ObjectRef) else held, strict=True))
    return BlockView(parse(header), pieces=pieces, writable=False)


def _nodes(locators: Sequence[Locator]) -> list[str]:
    return list(dict.fromkeys(locator.node for locator in locators))


def _grouped(pieces: Mapping[int, Bytes]) -> list[list[int]]:
    """Group adjacent pieces into objects of at most OBJECT_BYTES, as far as a single piece allows."""
    groups: list[list[int]] = [[]]
    size = 0
    for start, piece in pieces.items():
        if groups[-1] and size + piece.nbytes > OBJECT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(start)
        size += piece.nbytes
    return groups


def _warn_of_small_store(node: str, budget_bytes: int) -> None:
    """Warn if the budget does not fit into the object store, which spills to disk when it is full."""
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # Ray leaves it untyped
    for each in nodes():
        size = int(each["Resources"].get("object_store_memory", 0))
        if each["NodeID"] == node and size < budget_bytes:
            log.warning(
                "storage.budget_gb allows %d MB on node %s, but its object store has %d MB; Ray spills the rest",
                budget_bytes >> 20, node, size >> 20,
            )  # fmt: skip
