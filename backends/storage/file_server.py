"""The storage actor of a node: sends the blocks of `SimpleStorage` to readers on other nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tqppo.queue.link.replies import RayReply
from tqppo.queue.storage import StorageSpec

from .nodes import NodeActor, NodeActors
from .rows import Pieces, excerpt_pieces
from .segments import Segments
from .simple import BlockRequest, BlockRowsRequest, folder_name, pieces_of


class FileServer(NodeActor):
    """The storage actor of a node: creates the node's files if there are none, and sends blocks to other nodes."""

    def __init__(self, spec: StorageSpec, node: str) -> None:
        name = folder_name(spec, node)
        owned = Segments.find(name, spec.budget_bytes, spec.dir)
        self._segments = owned or Segments.create(name, spec.budget_bytes, spec.dir)

    def read(self, requests: Sequence[BlockRequest], columns: Sequence[str] | None) -> list[Pieces | None]:
        found = [self._segments.read(*request, columns) for request in requests]
        return [None if view is None else pieces_of(view, columns) for view in found]

    def read_rows(self, requests: Sequence[BlockRowsRequest]) -> list[Pieces | None]:
        found = [(self._segments.read(*block, columns), columns, rows) for block, columns, rows in requests]
        return [None if view is None else excerpt_pieces(view, columns, rows) for view, columns, rows in found]

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self._segments.free(name)

    def sweep(self, known: Collection[str], older_than_s: float) -> None:
        self._segments.sweep(known, older_than_s)

    def close(self) -> None:
        self._segments.remove()


class FileServers:
    """The file servers of a run, as a storage on any node calls them."""

    def __init__(self, spec: StorageSpec) -> None:
        self._spec = spec
        self._actors = NodeActors(spec)

    async def start_on(self, node: str) -> None:
        """Start the node's server unless it runs."""
        if node not in self._actors:
            await self._actors.start(node, FileServer, self._spec, node)

    def read(
        self, node: str, requests: Sequence[BlockRequest], columns: Sequence[str] | None
    ) -> RayReply[list[Pieces | None]]:
        return self._actors.ask(node, FileServer.read, requests, columns)

    def read_rows(self, node: str, requests: Sequence[BlockRowsRequest]) -> RayReply[list[Pieces | None]]:
        return self._actors.ask(node, FileServer.read_rows, requests)

    def free(self, node: str, names: Sequence[str]) -> None:
        self._actors.tell(node, FileServer.free, names)

    def sweep(self, known: Collection[str], older_than_s: float, *, but: str) -> None:
        """Sweep the nodes whose servers were started here, except one."""
        for node in self._actors.nodes():
            if node != but:
                self._actors.tell(node, FileServer.sweep, known, older_than_s)

    async def close(self) -> None:
        await self._actors.close()
