"""A checksum per tensor, with which an engine shows that it has the very weights that were published.

Imports nothing of tqppo: the extension inside a vLLM server loads this file by its path.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**22  # elements at a time: a hash needs several times the memory of its tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179  # odd numbers without pattern


def checksum(tensor: Tensor) -> str:
    """`dtype:hex`: the sum of a hash of each element's bits, modulo 2⁶⁴.

    The order of the elements does not count, and zeros count for nothing, so that the checksums of parts add up to
    that of the whole: engines join tensors, pad them and split them over GPUs.
    """
    total = 0
    for part in torch.split(tensor.detach().reshape(-1), CHUNK):
        bits = part.view(_INTEGERS[part.element_size()]).to(torch.int64) * _FIRST
        bits ^= bits >> 32
        total += int((bits * _SECOND).sum())
    return joined(str(tensor.dtype).removeprefix("torch."), [total])


def joined(dtype: str, totals: list[int]) -> str:
    """The checksum of parts of one type."""
    return f"{dtype}:{sum(totals) % 2**64:016x}"


def added(checksums: list[str]) -> str:
    """The checksum of a whole, from those of its parts; empty if their types differ."""
    pairs = [each.split(":") for each in checksums]
    dtypes = {dtype for dtype, _ in pairs}
    return joined(dtypes.pop(), [int(total, 16) for _, total in pairs]) if len(dtypes) == 1 else ""
