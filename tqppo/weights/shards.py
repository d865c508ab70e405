"""Gathers tensors that FSDP has sharded over the ranks, and shards whole ones again."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, detached. For a sharded tensor this is a collective that every rank must join."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a full tensor, sharded as `other` is; no communication."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device, copy=True)
    mesh = other.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, other.placements, src_data_rank=None)
