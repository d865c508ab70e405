"""Sharded tensors on a mesh of one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

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


class Gathered(TorchDispatchMode):
    """Records the types of the tensors that are gathered over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "all_gather" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_are_cast_before_they_are_gathered(dtype: torch.dtype) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded = DTensor.from_local(torch.randn(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        with Gathered() as gathered:
            found = whole(sharded, dtype)
    finally:
        dist.destroy_process_group()
    assert gathered.dtypes == [dtype]
    assert found.dtype == dtype
    assert found.shape == (4, 3)
