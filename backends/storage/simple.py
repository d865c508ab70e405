"""SimpleStorage: blocks in shared-memory files on each node. Writers and readers of one node share the files directly;
a node's storage actor serves them to readers on other nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tqppo.errors import DataLost
from tqppo.processes.ray_calls import this_node
from tqppo.queue.blocks.block import Block, BlockView
from tqppo.queue.storage import Locator, RowRequest, StorageSpec

from .folders import PREFIX, remove_run
from .nodes import NodeActor, NodeActors
from .rows import Pieces, by_node, excerpt_pieces, opened
from .segments import Segments

MAX_MAPPED_BLOCKS = 64  # of one read, because each mapped block takes two descriptors; with more, all are copied
BlockRequest = tuple[str, str, int]  # place, block, bytes


class SimpleStorage:
    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self._segments: Segments | None = None
        self._servers = NodeActors(spec)
        self._node = ""

    async def start(self, node: str) -> None:
        """Create this node's files. Once a second node joins, start a server on every node."""
        if node == self.node:
            self._segments = Segments.create(folder_name(self.spec, node), self.spec.budget_bytes, self.spec.dir)
            return
        for each in (self.node, node):
            if each not in self._servers:
                await self._servers.start(each, FileServer, self.spec, each)

    async def write(self, block: Block) -> Locator:
        try:
            place = self._here().write(block)
        except FileNotFoundError as error:
            raise _gone(self.spec, self.node) from error
        return Locator(self.node, block.layout.block, block.num_bytes, place)

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        found: list[BlockView | None] = [None] * len(locators)
        elsewhere: dict[str, list[int]] = {}
        for i, locator in enumerate(locators):
            if locator.node == self.node:
                view = self._here().read(*_request(locator), columns)
                found[i] = view if view is None or len(locators) <= MAX_MAPPED_BLOCKS else _copied(view, columns)
            else:
                elsewhere.setdefault(locator.node, []).append(i)
        replies = {
            node: self._servers.ask(node, FileServer.read, [_request(locators[i]) for i in places], columns)
            for node, places in elsewhere.items()
        }
        for node, places in elsewhere.items():
            for i, sent in zip(places, await replies[node], strict=True):
                found[i] = opened(sent)
        return found

    async def read_rows(self, requests: Sequence[RowRequest]) -> list[BlockView | None]:
        found: list[BlockView | None] = [None] * len(requests)
        places = by_node(requests)
        replies = {
            node: self._servers.ask(
                node, FileServer.read_rows,
                [(_request(requests[i].locator), requests[i].columns, requests[i].rows) for i in here],
            )
            for node, here in places.items()
        }  # fmt: skip
        for node, here in places.items():
            for i, sent in zip(here, await replies[node], strict=True):
                found[i] = opened(sent)
        return found

    def free(self, locators: Sequence[Locator]) -> None:
        elsewhere: dict[str, list[str]] = {}
        for locator in locators:
            if locator.node == self.node:
                self._here().free(locator.place)
            else:
                elsewhere.setdefault(locator.node, []).append(locator.place)
        for node, names in elsewhere.items():
            self._servers.tell(node, FileServer.free, names)

    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None:
        files = {locator.place for locator in known}
        self._here().sweep(files, older_than_s)
        for node in self._servers.nodes():
            if node != self.node:
                self._servers.tell(node, FileServer.sweep, files, older_than_s)

    async def close(self) -> None:
        await self._servers.close()
        if self._segments is not None:
            self._segments.remove()
        remove_run(f"{PREFIX}{self.spec.run}-", self.spec.dir)  # also those of owners that were killed

    @property
    def node(self) -> str:
        if not self._node:
            self._node = this_node() if self.spec.distributed else "local"
        return self._node

    def _here(self) -> Segments:
        """This node's files, which `start` has created before the first write."""
        if self._segments is None:
            self._segments = find(self.spec, self.node)
        return self._segments


class FileServer(NodeActor):
    """The storage actor of a node: creates the node's files if there are none, and sends blocks to other nodes."""

    def __init__(self, spec: StorageSpec, node: str) -> None:
        name = folder_name(spec, node)
        owned = Segments.find(name, spec.budget_bytes, spec.dir)
        self._segments = owned or Segments.create(name, spec.budget_bytes, spec.dir)

    def read(self, requests: Sequence[BlockRequest], columns: Sequence[str] | None) -> list[Pieces | None]:
        found = [self._segments.read(*request, columns) for request in requests]
        return [None if view is None else _pieces(view, columns) for view in found]

    def read_rows(self, requests: Sequence[tuple[BlockRequest, Sequence[str], np.ndarray]]) -> list[Pieces | None]:
        found = [(self._segments.read(*block, columns), columns, rows) for block, columns, rows in requests]
        return [None if view is None else excerpt_pieces(view, columns, rows) for view, columns, rows in found]

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self._segments.free(name)

    def sweep(self, known: Collection[str], older_than_s: float) -> None:
        self._segments.sweep(known, older_than_s)

    def close(self) -> None:
        self._segments.remove()


def _pieces(view: BlockView, columns: Sequence[str] | None) -> Pieces:
    layout = view.layout
    return layout.header, {start: view.piece(start, size) for start, size in layout.pieces(columns)}


def _copied(view: BlockView, columns: Sequence[str] | None) -> BlockView:
    _, pieces = _pieces(view, columns)
    return BlockView(view.layout, pieces={start: piece.copy() for start, piece in pieces.items()}, writable=True)


def folder_name(spec: StorageSpec, node: str) -> str:
    return f"{PREFIX}{spec.run}-{node[:12]}"


def find(spec: StorageSpec, node: str) -> Segments:
    found = Segments.find(folder_name(spec, node), spec.budget_bytes, spec.dir)
    if found is None:
        raise _gone(spec, node)
    return found


def _gone(spec: StorageSpec, node: str) -> DataLost:
    return DataLost(f"the queue's files on node {node} are gone: {folder_name(spec, node)}")


def _request(locator: Locator) -> BlockRequest:
    return locator.place, locator.block, locator.num_bytes
