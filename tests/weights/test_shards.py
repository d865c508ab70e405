"""Sharded tensors on a mesh of one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tqppo.weights.shards import Rows, is_sharded, own_rows, rows_of, sharded_like, whole


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_tensor_is_gathered_and_sharded_again(mesh: DeviceMesh) -> None:
    tensor = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(tensor, mesh, [Shard(0)])
    assert is_sharded(sharded)
    assert torch.equal(whole(sharded), tensor)
    assert rows_of(sharded) == Rows(0, 3)
    again = sharded_like(own_rows(sharded), sharded)
    assert is_sharded(again)
    assert torch.equal(whole(again), tensor)


def test_a_plain_tensor_stays_plain() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not is_sharded(tensor)
    assert not whole(tensor).requires_grad
    assert not own_rows(tensor).requires_grad
    assert rows_of(tensor) == Rows(0, 2)
    assert sharded_like(torch.zeros(2, dtype=torch.float64), tensor).dtype == torch.float32
