"""Rows for the storage contract, and Ray actors that put and compare them. Workers import it, so it needs no pytest."""

from __future__ import annotations

from collections.abc import Sequence

import ray
import torch
from torch import Tensor

from tqppo.columns import Column, Kind, declare
from tqppo.queue.client import Queue

MIB = 1 << 20

declare(Column("check_tokens", Kind.RAGGED, "any"))
declare(Column("check_wide", Kind.RAGGED, "any", trailing=(None, None)))
declare(Column("check_positions", Kind.RAGGED, "int64", ragged_dim=1))
declare(Column("check_number", Kind.ROW, "any"))
declare(Column("check_image", Kind.ROW, "any", trailing=(None, None, None)))
declare(Column("check_json", Kind.JSON))


def keys(count: int, name: str = "row") -> list[str]:
    return [f"{name}{i}_0_0" for i in range(count)]


def numbers(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype))


def check_ragged(found: Tensor, rows: Sequence[Tensor], dtype: str) -> None:
    assert found.layout is torch.jagged
    assert found.dtype is getattr(torch, dtype)
    assert len(found.unbind()) == len(rows)
    for one, other in zip(found.unbind(), rows, strict=True):
        assert torch.equal(one, other)


@ray.remote(num_cpus=0)
class Producer:
    """Puts rows one by one, then marks its prompt as finished."""

    async def produce(self, queue: Queue, name: str, count: int) -> None:
        for i in range(count):
            key = f"{name}_{i}_0"
            await queue.aio.put([key], {"check_tokens": [torch.full((i,), i)]}, tags=[{"uid": name, "session": i}])
        await queue.aio.tag({name: {"is_prompt": True, "status": "finished", "rows": count}})


@ray.remote(num_cpus=0)
def consume(queue: Queue, name: str, count: int) -> None:
    """Waits for a prompt, checks its rows and adds a column to them."""
    queue.wait([name], timeout_s=150)
    batch = queue.list(where={"uid": name}).in_order()
    found = queue.get(batch, ["check_tokens"])["check_tokens"]
    check_ragged(found, [torch.full((i,), i) for i in range(count)], "int64")
    queue.put(batch, {"check_number": torch.arange(float(count))})
