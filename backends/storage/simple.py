"""SimpleStorage: blocks in shared-memory files on each node. Writers and readers of one node share the files directly;
a node's storage actor (`file_server`) serves them to readers on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tqppo.errors import DataLost
from tqppo.processes.nodes import this_node
from tqppo.queue.blocks.block import Block, BlockView
from tqppo.queue.storage import FOLDER_PREFIX, Locator, RowRequest, StorageSpec

from .folders import remove_run
from .rows import Pieces, by_node, opened
from .segments import Segments

if TYPE_CHECKING:
    from .file_server import FileServers

MAX_MAPPED_BLOCKS = 64  # of one read, because each mapped block takes two descriptors; with more, all are copied
BlockRequest = tuple[str, str, int]  # place, block, bytes
BlockRowsRequest = tuple[BlockRequest, Sequence[str], np.ndarray]  # block, columns, rows


class SimpleStorage:
    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self._segments: Segments | None = None
        self._node = ""

    async def start(self, node: str) -> None:
        """Create this node's files. Once a second node joins, start a server on every node."""
        if node == self.node:
            self._segments = Segments.create(folder_name(self.spec, node), self.spec.budget_bytes, self.spec.dir)
            return
        for each in (self.node, node):
            await self._servers.start_on(each)

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
            node: self._servers.read(node, [_request(locators[i]) for i in places], columns)
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
            node: self._servers.read_rows(node, [_rows_request(requests[i]) for i in here])
            for node, here in places.items()
        }
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
            self._servers.free(node, names)

    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None:
        files = {locator.place for locator in known}
        self._here().sweep(files, older_than_s)
        if self.spec.distributed:
            self._servers.sweep(files, older_than_s, but=self.node)

    async def close(self) -> None:
        if self.spec.distributed:
            await self._servers.close()
        if self._segments is not None:
            self._segments.remove()
        remove_run(f"{FOLDER_PREFIX}{self.spec.run}-", self.spec.dir)  # also those of owners that were killed

    @cached_property
    def _servers(self) -> FileServers:
        """The servers of other nodes. A queue of one process has none, and does without Ray."""
        from .file_server import FileServers

        return FileServers(self.spec)

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


def pieces_of(view: BlockView, columns: Sequence[str] | None) -> Pieces:
    layout = view.layout
    return layout.header, {start: view.piece(start, size) for start, size in layout.pieces(columns)}


def _copied(view: BlockView, columns: Sequence[str] | None) -> BlockView:
    _, pieces = pieces_of(view, columns)
    return BlockView(view.layout, pieces={start: piece.copy() for start, piece in pieces.items()}, writable=True)


def folder_name(spec: StorageSpec, node: str) -> str:
    return f"{FOLDER_PREFIX}{spec.run}-{node[:12]}"


def find(spec: StorageSpec, node: str) -> Segments:
    found = Segments.find(folder_name(spec, node), spec.budget_bytes, spec.dir)
    if found is None:
        raise _gone(spec, node)
    return found


def _gone(spec: StorageSpec, node: str) -> DataLost:
    return DataLost(f"the queue's files on node {node} are gone: {folder_name(spec, node)}")


def _request(locator: Locator) -> BlockRequest:
    return locator.place, locator.block, locator.num_bytes


def _rows_request(request: RowRequest) -> BlockRowsRequest:
    return _request(request.locator), request.columns, request.rows
