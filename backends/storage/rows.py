"""Rows of blocks on their way to another node: what a node's storage actor sends, and what the reader makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tqppo.queue.blocks.block import BlockView, Bytes, parse
from tqppo.queue.blocks.gather import excerpt
from tqppo.queue.storage import RowRequest

Pieces = tuple[bytes, dict[int, Bytes]]  # header, start → bytes; without the padding between pieces


def excerpt_pieces(view: BlockView, columns: Sequence[str], rows: np.ndarray) -> Pieces:
    """Some rows and columns of a block, as a smaller block. Adjacent rows of private memory are not copied."""
    smaller = excerpt(view, columns, rows)
    return smaller.layout.header, dict(smaller.pieces[1:])


def opened(sent: Pieces | None) -> BlockView | None:
    """Ray's memory, in which the pieces arrive, is read-only."""
    return None if sent is None else BlockView(parse(sent[0]), pieces=sent[1], writable=False)


def by_node(requests: Sequence[RowRequest]) -> dict[str, list[int]]:
    """The places of the requests in the list, by the node that has the block: one message goes to each."""
    places: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        places.setdefault(request.locator.node, []).append(i)
    return places
