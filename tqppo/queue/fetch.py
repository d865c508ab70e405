"""Reads located cells: whole columns of blocks on this node, which are mapped, and only the rows asked for of others.

A block on another node that holds the rows of many ranks would otherwise travel to each of them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tqppo.queue.blocks.block import BlockView
from tqppo.queue.index.answers import Located
from tqppo.queue.storage import RowRequest, RowStorage, Storage

FetchedCells = tuple[list[str], np.ndarray, np.ndarray]  # columns; per row the view that holds it, and its place there


@dataclass(frozen=True, slots=True)
class Fetched:
    """Views, the cells in them, and which blocks (by their place in `Located.blocks`) do not exist."""

    views: dict[int, BlockView]
    cells: list[FetchedCells]
    missing: list[int]


async def fetch(store: Storage, located: Located, columns: Sequence[str], here: str) -> Fetched:
    """Read the cells; a storage that cannot send rows sends whole columns of every block."""
    num_blocks = len(located.blocks)
    far = [False] * num_blocks
    if isinstance(store, RowStorage):
        far = [locator.node != here for _, locator in located.blocks]
    near = [i for i in range(num_blocks) if not far[i]]
    requests, origins, cells = _by_rows(located, far)
    found: dict[int, BlockView | None] = {}
    if near:
        found.update(zip(near, await store.read([located.blocks[i][1] for i in near], columns), strict=True))
    if requests and isinstance(store, RowStorage):
        found.update(enumerate(await store.read_rows(requests), num_blocks))
    missing = {i if i < num_blocks else origins[i - num_blocks] for i, view in found.items() if view is None}
    views = {i: view for i, view in found.items() if view is not None}
    return Fetched(views, cells, sorted(missing))


def _by_rows(located: Located, far: Sequence[bool]) -> tuple[list[RowRequest], list[int], list[FetchedCells]]:
    """Requests for the rows of far blocks, the block that each is about, and the cells as they are in the answers.

    The answer to request k becomes view `len(located.blocks) + k`; columns with other rows of the same block are a
    request of their own.
    """
    requests: list[RowRequest] = []
    origins: list[int] = []
    cells: list[FetchedCells] = []
    for names, block, row in located.groups:
        views, places = block.copy(), row.copy()
        for i in (i for i in np.unique(block).tolist() if far[i]):
            mine = block == i
            rows, places[mine] = np.unique(row[mine], return_inverse=True)
            views[mine] = len(far) + len(requests)
            requests.append(RowRequest(located.blocks[i][1], tuple(names), rows))
            origins.append(i)
        cells.append((names, views, places))
    return requests, origins, cells
