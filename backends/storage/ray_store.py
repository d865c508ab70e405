"""RayStorage: blocks as Ray objects, kept by an actor of their node so that a producer's death loses nothing.

Small columns of a block share objects, a wide column has its own, so that a reader on another node fetches little more
than it asks for; a small block stays in the actor itself. Ray's memory is read-only, and a write to it would end the
process: readers get copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from tqppo.errors import BackendError
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.block import Block, BlockView, Bytes, Layout, parse
from tqppo.queue.calls import Remote

from .nodes import NodeActors, this_node, who

log = logging.getLogger(__name__)

SMALL = 64 << 10  # bytes of a block that is not worth objects of its own
WIDE = 16 << 20  # bytes; what is larger has an object of its own: every object costs messages, every byte a transfer

Part = tuple[Any, list[int]]  # object (a list of arrays; None: in the actor), and where they start in the block


class RayStorage:
    def __init__(self, spec: StorageSpec) -> None:
        if not spec.distributed:
            raise BackendError("storage 'ray' needs Ray; use storage 'simple' for a queue in one process")
        self.spec = spec
        self._keepers = NodeActors(spec)
        self._node = ""

    async def start(self, node: str) -> None:
        await self._keepers.start(node, Keeper)
        _warn_of_small_store(node, self.spec.budget_bytes)

    async def write(self, block: Block) -> Locator:
        groups = _grouped(block)
        arrays = [[piece for _, piece in group] for group in groups]
        node, name, small = self.node, block.layout.block, block.num_bytes <= SMALL
        refs = await Remote(self._keepers.of(node).keep.remote(name, arrays, small), who(node), self.spec.timeout_s)
        parts = [(ref, [start for start, _ in group]) for ref, group in zip(refs, groups, strict=True)]
        return Locator(node, name, block.num_bytes, (block.layout.header, parts))

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        layouts = [parse(locator.place[0]) for locator in locators]
        wanted = [_having(locator.place[1], layout, columns) for locator, layout in zip(locators, layouts, strict=True)]
        small = await self._small([locator for locator in locators if locator.num_bytes <= SMALL])
        refs = [ref for parts in wanted for ref, _ in parts if ref is not None]
        nodes = ", ".join(sorted({locator.node for locator in locators}))
        objects = iter(await Remote(refs, who(nodes), self.spec.timeout_s) if refs else ())
        views: list[BlockView | None] = []
        for locator, layout, parts in zip(locators, layouts, wanted, strict=True):
            if locator.num_bytes <= SMALL:
                arrays = small[locator.block]
                pieces = None if arrays is None else dict(zip([s for s, _ in layout.pieces()], arrays, strict=True))
            else:
                pieces = {start: a for _, starts in parts for start, a in zip(starts, next(objects), strict=True)}
            views.append(None if pieces is None else BlockView(layout, pieces=pieces, writable=False))
        return views

    async def _small(self, locators: Sequence[Locator]) -> dict[str, list[Bytes] | None]:
        """The pieces of small blocks, one request per node."""
        by_node: dict[str, list[str]] = {}
        for locator in locators:
            by_node.setdefault(locator.node, []).append(locator.block)
        replies = {
            node: Remote(self._keepers.of(node).read.remote(blocks), who(node), self.spec.timeout_s)
            for node, blocks in by_node.items()
        }
        found: dict[str, list[Bytes] | None] = {}
        for node, blocks in by_node.items():
            found.update(zip(blocks, await replies[node], strict=True))
        return found

    def free(self, locators: Sequence[Locator]) -> None:
        by_node: dict[str, list[str]] = {}
        for locator in locators:
            by_node.setdefault(locator.node, []).append(locator.block)
        for node, blocks in by_node.items():
            self._keepers.of(node).drop.remote(blocks)

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


class Keeper:
    """The actor of a node: owns the objects of its blocks."""

    def __init__(self) -> None:
        self._refs: dict[str, list[Any]] = {}
        self._small: dict[str, list[Bytes]] = {}
        self._kept_at: dict[str, float] = {}

    def ready(self) -> bool:
        return True

    def keep(self, block: str, groups: list[list[Bytes]], small: bool) -> list[Any]:
        self._kept_at[block] = time.monotonic()
        if small:
            self._small[block] = [piece.copy() for group in groups for piece in group]
            return [None] * len(groups)
        self._refs[block] = [ray.put(group) for group in groups]  # ours now, whatever becomes of the caller
        return self._refs[block]

    def read(self, blocks: Sequence[str]) -> list[list[Bytes] | None]:
        return [self._small.get(block) for block in blocks]

    def drop(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            self._refs.pop(block, None)
            self._small.pop(block, None)
            self._kept_at.pop(block, None)

    def sweep(self, known: Collection[str], older_than_s: float) -> None:
        old = time.monotonic() - older_than_s
        self.drop([block for block, kept_at in list(self._kept_at.items()) if kept_at < old and block not in known])

    def close(self) -> None:
        self.drop(list(self._kept_at))


def _grouped(block: Block) -> list[list[tuple[int, Bytes]]]:
    """The pieces of a block by object: neighbours together while they are small. The header goes with the locator."""
    groups: list[list[tuple[int, Bytes]]] = [[]]
    size = 0
    for start, piece in block.pieces[1:]:
        if groups[-1] and size + piece.nbytes > WIDE:
            groups.append([])
            size = 0
        groups[-1].append((start, piece))
        size += piece.nbytes
    return groups


def _having(parts: Sequence[Part], layout: Layout, columns: Sequence[str] | None) -> list[Part]:
    """The objects that hold something of these columns."""
    needed = {start for start, _ in layout.pieces(columns)}
    return [part for part in parts if not needed.isdisjoint(part[1])]


def _warn_of_small_store(node: str, budget_bytes: int) -> None:
    """A full object store spills to disk instead of pushing back, so the budget should fit into it."""
    for each in ray.nodes():
        size = int(each["Resources"].get("object_store_memory", 0))
        if each["NodeID"] == node and size < budget_bytes:
            log.warning(
                "storage.budget_gb allows %d MB on node %s, but its Ray object store has %d MB; the rest goes to disk",
                budget_bytes >> 20, node, size >> 20,
            )  # fmt: skip
