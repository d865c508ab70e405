"""Tensors that FSDP has sharded over the ranks: gathered, or each rank's own rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that a rank holds: `count` of them, from row `begin`."""

    begin: int
    count: int
    is_first_copy: bool = True  # False: ranks before this one hold the same rows


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


def rows_of(tensor: Tensor) -> Rows:
    """Which rows of a tensor this rank holds: all of one that is not sharded. FSDP cuts along the first dimension."""
    if not isinstance(tensor, DTensor):
        return Rows(0, tensor.shape[0] if tensor.dim() else 1)
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), f"{placements} does not cut along the first dimension"
    place = mesh.get_coordinate()
    assert place is not None, "this rank is part of the mesh"
    copies = [each for each, placement in zip(place, placements, strict=True) if placement.is_replicate()]
    return Rows(int(offset[0]) if shape[0] else 0, int(shape[0]), not any(copies))


def own_rows(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, detached; no communication."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(rows: Tensor, other: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded as `other` is, with its type and device; no communication."""
    if not isinstance(other, DTensor):
        return rows.to(other.device, other.dtype)
    mesh = other.device_mesh
    local = rows.to(mesh.device_type, other.dtype)
    return DTensor.from_local(local, mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride())
