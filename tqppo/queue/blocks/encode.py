"""Checks what callers give to `put` against the declared columns and turns it into bytes, mostly without a copy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from tqppo.columns import Column, Kind, column
from tqppo.errors import QueueError
from tqppo.queue.blocks.block import Block, Bytes, Encoded, build
from tqppo.queue.link.calls import first_line
from tqppo.queue.meta import ColumnData, Jagged, Json

Lengths = Sequence[int] | np.ndarray | Tensor


def encode(columns: Mapping[str, ColumnData], keys: Sequence[str]) -> Block:
    """A block of these columns, each of which must have one row per key."""
    return build([_encode(column(name), data, keys) for name, data in columns.items()], len(keys))


def _encode(declared: Column, data: ColumnData, keys: Sequence[str]) -> Encoded:
    try:
        return _encode_as_declared(declared, data, keys)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        found = f"{type(data).__name__}: {first_line(error)}"
        raise QueueError(f"column {declared.name!r} cannot be stored from a {found}") from error


def _encode_as_declared(declared: Column, data: ColumnData, keys: Sequence[str]) -> Encoded:
    if declared.kind is Kind.JSON:
        return _json(declared, data, keys)
    if declared.kind is Kind.ROW:
        return _dense(declared, data, len(keys))
    return _ragged(declared, data, len(keys))


def _json(declared: Column, data: ColumnData, keys: Sequence[str]) -> Encoded:
    if isinstance(data, (str, bytes)) or not isinstance(data, Sequence):
        raise QueueError(f"column {declared.name!r} holds JSON: give a list with one value per row")
    _check_rows(declared, len(data), len(keys))
    rows = [_json_row(declared, value, key) for value, key in zip(data, keys, strict=True)]
    values = np.frombuffer(b"".join(rows), np.uint8)
    return Encoded(declared.name, "json", "json", (), 0, values, _offsets([len(row) for row in rows]))


def _json_row(declared: Column, value: Json, key: str) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise QueueError(f"column {declared.name!r} of row {key!r} is not JSON: {error}") from error


def _dense(declared: Column, data: ColumnData, num_rows: int) -> Encoded:
    tensor = _dense_tensor(declared, data)
    if tensor.dim() == 0:
        raise QueueError(f"column {declared.name!r} was given a scalar; it needs one value per row")
    _check_rows(declared, tensor.shape[0], num_rows)
    _check(declared, tensor.dtype, tuple(tensor.shape[1:]))
    return Encoded(declared.name, "dense", dtype_name(tensor.dtype), tuple(tensor.shape[1:]), 0, as_bytes(tensor), None)


def _dense_tensor(declared: Column, data: ColumnData) -> Tensor:
    if isinstance(data, Tensor):
        if data.is_nested:
            raise QueueError(f"column {declared.name!r} has one value per row; it was given a nested tensor")
        return data.detach()
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data if data.flags.c_contiguous else data.copy())
    if isinstance(data, (list, tuple)):
        if data and isinstance(data[0], Tensor):
            return torch.stack([row.detach() for row in data])
        return torch.tensor(data, dtype=_declared_dtype(declared)).reshape(len(data), *_inner(data))
    raise QueueError(f"column {declared.name!r} was given a {type(data).__name__}; give a tensor or a list")


def _inner(data: Sequence[ColumnData]) -> tuple[int, ...]:
    return np.shape(data)[1:] if len(data) else ()


def _ragged(declared: Column, data: ColumnData, num_rows: int) -> Encoded:
    values, lengths = _flattened(declared, data)
    _check_rows(declared, len(lengths), num_rows)
    offsets = _offsets(lengths)
    if values.dim() == 0 or offsets[-1] != values.shape[0] or (np.diff(offsets) < 0).any():
        raise QueueError(
            f"column {declared.name!r}: its lengths add up to {offsets[-1]}, its values are {tuple(values.shape)}"
        )
    _check(declared, values.dtype, tuple(values.shape[1:]))
    shape, dtype = tuple(values.shape[1:]), dtype_name(values.dtype)
    return Encoded(declared.name, "ragged", dtype, shape, declared.ragged_dim, as_bytes(values), offsets)


def _flattened(declared: Column, data: ColumnData) -> tuple[Tensor, Lengths]:
    """The rows one after the other, tokens first [sum(lengths), *trailing], and their lengths."""
    if isinstance(data, Jagged):
        values = data.values.detach()
        return (values.movedim(declared.ragged_dim, 0) if declared.ragged_dim else values), data.lengths
    if isinstance(data, NestedTensor):
        return _jagged(declared, data)
    if isinstance(data, Tensor) and data.is_nested:
        return _from_list(declared, list(data.detach().unbind()))  # strided
    if isinstance(data, (list, tuple)):
        return _from_list(declared, data)
    raise QueueError(
        f"column {declared.name!r} is ragged: give a jagged nested tensor, Jagged(values, lengths) or a list of rows, "
        f"not a {type(data).__name__}"
    )


def _jagged(declared: Column, data: NestedTensor) -> tuple[Tensor, Lengths]:
    """Values and lengths of a jagged tensor, by its attributes: a method call would cost a tenth of a millisecond."""
    if data._lengths is not None:  # narrowed, with gaps between the rows
        return _from_list(declared, list(data.detach().unbind()))
    ragged = data._ragged_idx - 1
    if ragged != declared.ragged_dim:
        raise QueueError(
            f"column {declared.name!r} is declared ragged in dimension {declared.ragged_dim} of a row; "
            f"it was given a tensor that is ragged in dimension {ragged}"
        )
    values, offsets = data._values.detach(), data._offsets.cpu().numpy()
    values = values.movedim(ragged, 0) if ragged else values
    return values[offsets[0] : offsets[-1]], np.diff(offsets)


def _from_list(declared: Column, rows: Sequence[ColumnData]) -> tuple[Tensor, Lengths]:
    dtype = _declared_dtype(declared)
    tensors = [row.detach() if isinstance(row, Tensor) else torch.tensor(row, dtype=dtype) for row in rows]
    if any(row.dim() <= declared.ragged_dim for row in tensors):
        raise QueueError(f"column {declared.name!r}: a row has too few dimensions to vary in {declared.ragged_dim}")
    if declared.ragged_dim:
        tensors = [row.movedim(declared.ragged_dim, 0) for row in tensors]
    if len({(row.dtype, row.shape[1:]) for row in tensors}) > 1:
        found = sorted({f"{row.dtype} {tuple(row.shape)}" for row in tensors})
        raise QueueError(f"column {declared.name!r}: its rows do not fit together: {', '.join(found[:4])}")
    if not tensors:
        return torch.empty(0, *(size or 0 for size in declared.trailing), dtype=dtype), []
    return torch.cat(tensors), [row.shape[0] for row in tensors]


def _offsets(lengths: Lengths) -> np.ndarray:
    if isinstance(lengths, Tensor):
        lengths = lengths.cpu().numpy()
    counts = np.asarray(lengths, np.int64)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _check_rows(declared: Column, found: int, expected: int) -> None:
    if found != expected:
        raise QueueError(f"column {declared.name!r} has {found} rows for {expected} keys")


def _check(declared: Column, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if declared.dtype != "any" and dtype_name(dtype) != declared.dtype:
        raise QueueError(f"column {declared.name!r} is declared {declared.dtype}; it was given {dtype_name(dtype)}")
    sizes = declared.trailing
    if not sizes and declared.ragged_dim:
        return  # the sizes of the other dimensions come from the data
    if sizes and (len(sizes) != len(shape) or any(a not in (None, b) for a, b in zip(sizes, shape, strict=True))):
        raise QueueError(f"column {declared.name!r} is declared with trailing shape {sizes}; it was given {shape}")
    if not sizes and shape:
        raise QueueError(f"column {declared.name!r} is declared without a trailing shape; it was given {shape}")


def as_bytes(tensor: Tensor) -> Bytes:
    """The tensor's memory; copied only if it is on a device or not contiguous."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _declared_dtype(declared: Column) -> torch.dtype | None:
    return None if declared.dtype == "any" else torch_dtype(declared.dtype)


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise QueueError(f"{name!r} is not a torch dtype")
    return found
