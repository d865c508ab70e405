"""Gathers tensors that FSDP has sharded over the ranks, and shards whole ones again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The full tensor, detached. For a sharded tensor this is a collective that every rank must join.

    With a `dtype` each rank casts its shard first, so that a smaller type moves fewer bytes.
    """
    tensor = tensor.detach()
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a full tensor, sharded as `other` is; no communication."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device, copy=True)
    mesh = other.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, other.placements, src_data_rank=None)
