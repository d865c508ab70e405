"""The queue in one process, without Ray: what a user of it alone would do first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tqppo.algorithms.padding import padding_rows
from tqppo.columns import Column, Kind, declare
from tqppo.queue.client import BatchMeta, Queue


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=64 << 20, local=True)
    yield made
    made.close()


def test_columns_of_several_dimensions_and_their_padding_go_through_the_queue(queue: Queue) -> None:
    declare(Column("client_image", Kind.ROW, "float32", trailing=(3, None, None)))
    lengths = (5, 0, 2)
    columns = {
        "position_ids": [torch.arange(3 * n).view(3, n) for n in lengths],
        "routed_experts": [torch.arange(8 * n, dtype=torch.int16).view(n, 4, 2) for n in lengths],
        "client_image": torch.randn(3, 3, 8, 8),
    }
    batch = queue.put(["a_0_0", "b_0_0", "c_0_0"], columns)
    padding = padding_rows(2, {"position_ids": (3,), "routed_experts": (4, 2), "client_image": (3, 8, 8)})
    padded = queue.put(padding.keys, padding.columns, tags=padding.tags)
    found = queue.get(BatchMeta.join([batch, padded]), list(columns))
    for name in ("position_ids", "routed_experts"):
        rows = found[name].unbind()
        assert all(torch.equal(row, given) for row, given in zip(rows, columns[name], strict=False))
        assert not any(row.any() for row in rows[3:])
    assert [tuple(row.shape) for row in found["position_ids"].unbind()] == [(3, 5), (3, 0), (3, 2), (3, 2), (3, 2)]
    assert torch.equal(found["client_image"][:3], columns["client_image"])  # type: ignore[arg-type]
    assert not found["client_image"][3:].any()
