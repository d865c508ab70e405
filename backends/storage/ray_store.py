"""RayStorage: blocks as Ray objects, kept by an actor of their node so that a producer's death loses nothing.

Small columns of a block share one object, a wide column has its own, so that a reader on another node fetches what
it asks for. Ray's memory is read-only, and a write to it would end the process: readers get copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from tqppo.errors import BackendError
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.block import Block, BlockView, Bytes, aligned, parse
from tqppo.queue.calls import Remote

from .nodes import NodeActors, this_node, who

log = logging.getLogger(__name__)

WIDE = 1 << 20  # bytes of a column that has an object of its own

Part = tuple[Any, dict[int, int]]  # object, and where in it the block's pieces are: start in the block → in the object


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
        arrays, places = _packed(block)
        node, name = self.node, block.layout.block
        refs = await Remote(self._keepers.of(node).keep.remote(name, arrays), who(node), self.spec.timeout_s)
        parts = list(zip(refs, places, strict=True))
        return Locator(node, name, block.num_bytes, (block.layout.header, parts))

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        layouts = [parse(locator.place[0]) for locator in locators]
        pieces = [dict(layout.pieces(columns)) for layout in layouts]
        wanted: list[list[Part]] = [
            [part for part in locator.place[1] if not part[1].keys().isdisjoint(needed)]
            for locator, needed in zip(locators, pieces, strict=True)
        ]
        refs = [ref for parts in wanted for ref, _ in parts]
        nodes = ", ".join(sorted({locator.node for locator in locators}))
        arrays = iter(await Remote(refs, who(nodes), self.spec.timeout_s))
        return [
            BlockView(layout, pieces=_cut([(next(arrays), where) for _, where in parts], sizes), writable=False)
            for layout, parts, sizes in zip(layouts, wanted, pieces, strict=True)
        ]

    def free(self, locators: Sequence[Locator]) -> None:
        by_node: dict[str, list[str]] = {}
        for locator in locators:
            by_node.setdefault(locator.node, []).append(locator.block)
        for node, blocks in by_node.items():
            self._keepers.of(node).drop.remote(blocks)

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

    def ready(self) -> bool:
        return True

    def keep(self, block: str, arrays: list[Bytes]) -> list[Any]:
        self._refs[block] = [ray.put(array) for array in arrays]  # ours now, whatever becomes of the caller
        return self._refs[block]

    def drop(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            self._refs.pop(block, None)

    def close(self) -> None:
        self._refs.clear()


def _packed(block: Block) -> tuple[list[Bytes], list[dict[int, int]]]:
    """The small pieces in one array, every wide one as it is; and where in its array each piece begins."""
    pieces = block.pieces[1:]  # the header travels with the locator
    small = [(start, piece) for start, piece in pieces if piece.nbytes < WIDE]
    wide = [(start, piece) for start, piece in pieces if piece.nbytes >= WIDE]
    place, size = {}, 0
    for start, piece in small:
        place[start], size = size, aligned(size + piece.nbytes)
    packed = np.zeros(size, np.uint8)
    for start, piece in small:
        packed[place[start] : place[start] + piece.nbytes] = piece
    return [packed, *(piece for _, piece in wide)], [place, *({start: 0} for start, _ in wide)]


def _cut(parts: Sequence[tuple[Bytes, dict[int, int]]], sizes: dict[int, int]) -> dict[int, Bytes]:
    return {
        start: array[position : position + sizes[start]]
        for array, where in parts
        for start, position in where.items()
        if start in sizes
    }


def _warn_of_small_store(node: str, budget_bytes: int) -> None:
    """A full object store spills to disk instead of pushing back, so the budget should fit into it."""
    for each in ray.nodes():
        size = int(each["Resources"].get("object_store_memory", 0))
        if each["NodeID"] == node and size < budget_bytes:
            log.warning(
                "storage.budget_gb allows %d MB on node %s, but its Ray object store has %d MB; the rest goes to disk",
                budget_bytes >> 20, node, size >> 20,
            )  # fmt: skip
