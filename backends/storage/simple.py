"""SimpleStorage: blocks in shared-memory files of each node. On one node no process stands between writer and reader;
across nodes, the node's storage actor serves its files."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from tqppo.errors import DataLost
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.block import Block, BlockView

from .segments import Segments


class SimpleStorage:
    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self._segments: Segments | None = None
        self._node = ""

    async def start(self, node: str) -> None:
        self._segments = Segments.create(self._folder(node), self.spec.budget_bytes, self.spec.dir)

    async def write(self, block: Block) -> Locator:
        name = self._here().write(block)
        return Locator(self.node, block.layout.block, block.num_bytes, name)

    async def read(self, locators: Sequence[Locator], columns: Sequence[str]) -> list[BlockView | None]:
        here = self._here()
        return [here.read(found.place, found.block, found.num_bytes) for found in locators]

    def free(self, locators: Sequence[Locator]) -> None:
        for locator in locators:
            self._here().free(locator.place)

    def close(self) -> None:
        if self._segments is not None:
            self._segments.remove()

    @property
    def node(self) -> str:
        if not self._node:
            self._node = ray.get_runtime_context().get_node_id() if self.spec.distributed else "local"
        return self._node

    def _folder(self, node: str) -> str:
        return f"tqppo-{self.spec.run}-{node[:12]}"

    def _here(self) -> Segments:
        """This node's files; its owner has made them before anybody writes."""
        if self._segments is None:
            self._segments = Segments.find(self._folder(self.node), self.spec.budget_bytes, self.spec.dir)
        if self._segments is None:
            raise DataLost(f"the queue's files on node {self.node} are gone: {self._folder(self.node)}")
        return self._segments
