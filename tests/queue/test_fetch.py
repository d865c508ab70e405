"""Rows of blocks on another node, with a storage that keeps every block in this process and counts what it sends."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tqppo.queue.blocks.arena import Arena
from tqppo.queue.blocks.block import Block, BlockView, parse
from tqppo.queue.blocks.encode import encode
from tqppo.queue.blocks.gather import Runs, gather
from tqppo.queue.fetch import Fetched, fetch
from tqppo.queue.index.answers import Located
from tqppo.queue.link.calls import run
from tqppo.queue.storage import Locator, RowRequest

rows = importlib.import_module("tqppo_backends.storage.rows")

LENGTHS = [400, 700, 0, 900, 500, 600]
TOKENS = [torch.arange(n) + 1000 * n for n in LENGTHS]


class WholeStorage:
    """A storage without `read_rows`."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = {block.layout.block: block for block in blocks}
        self.sent_bytes = 0

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        return [self._view(locator) for locator in locators]

    def _view(self, locator: Locator) -> BlockView | None:
        block = self.blocks.get(locator.block)
        return None if block is None else BlockView(parse(block.flat()), whole=block.flat(), writable=True)


class RowsStorage(WholeStorage):
    async def read_rows(self, requests: Sequence[RowRequest]) -> list[BlockView | None]:
        return [self._sent(request) for request in requests]

    def _sent(self, request: RowRequest) -> BlockView | None:
        view = self._view(request.locator)
        if view is None:
            return None
        message = pickle.dumps(rows.excerpt_pieces(view, request.columns, request.rows))
        self.sent_bytes += len(message)
        opened: BlockView = rows.opened(pickle.loads(message))
        return opened


def block() -> Block:
    keys = [f"k{i}" for i in range(len(LENGTHS))]
    return encode({"tokens": TOKENS, "reward": torch.arange(float(len(LENGTHS)))}, keys)


def located(blocks: Sequence[tuple[str, Block]], cells: Sequence[tuple[int, int]]) -> Located:
    where = [(i, Locator(node, each.layout.block, each.num_bytes)) for i, (node, each) in enumerate(blocks)]
    numbers, places = np.array(cells).T
    return Located(where, [(["tokens"], numbers, places), (["reward"], numbers[::-1], places[::-1])])


def tokens(found: Fetched) -> list[list[int]]:
    _, views, places = found.cells[0]
    return [row.tolist() for row in gather(found.views, Runs.of(views, places), "tokens", Arena()).unbind()]


@pytest.mark.parametrize("places", [[3], [0, 1], [5, 0, 3], [4, 4], [2], [0, 1, 2, 3, 4, 5]])
def test_the_rows_of_a_far_block_arrive_alone_and_in_the_order_of_the_request(places: list[int]) -> None:
    far = block()
    store = RowsStorage([far])
    found = run(fetch(store, located([("there", far)], [(0, i) for i in places]), ["tokens", "reward"], "here"))
    assert tokens(found) == [TOKENS[i].tolist() for i in places]
    _, views, rewards = found.cells[1]
    assert gather(found.views, Runs.of(views, rewards), "reward", Arena()).tolist() == [float(i) for i in places[::-1]]
    asked = sum(LENGTHS[i] * 8 + 4 for i in set(places))
    assert store.sent_bytes <= 1.1 * asked + 1000, "headers are all that comes on top"


def test_near_and_far_blocks_are_read_together_and_only_the_far_one_is_cut() -> None:
    near, far = block(), block()
    store = RowsStorage([near, far])
    found = run(fetch(store, located([("here", near), ("there", far)], [(1, 1), (0, 3), (1, 0)]), ["tokens"], "here"))
    assert tokens(found) == [TOKENS[i].tolist() for i in (1, 3, 0)]
    assert found.views[0].layout.num_rows == len(LENGTHS)
    assert found.views[2].layout.num_rows == 2
    assert not found.missing


def test_a_storage_that_cannot_send_rows_sends_whole_blocks() -> None:
    far = block()
    found = run(fetch(WholeStorage([far]), located([("there", far)], [(0, 4), (0, 1)]), ["tokens"], "here"))
    assert tokens(found) == [TOKENS[i].tolist() for i in (4, 1)]
    assert found.views[0].layout.num_rows == len(LENGTHS)


@pytest.mark.parametrize("store_type", [WholeStorage, RowsStorage])
def test_a_block_that_does_not_exist_is_missing_by_its_place(store_type: type[WholeStorage]) -> None:
    there, gone = block(), block()
    asked = located([("there", there), ("there", gone)], [(0, 1), (1, 2)])
    assert run(fetch(store_type([there]), asked, ["tokens"], "here")).missing == [1]
