"""Checksums that show which bits a tensor has, whole or in parts."""

from __future__ import annotations

import pytest
import torch

from tqppo.weights import checksum as module
from tqppo.weights.checksum import added, checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_one_flipped_bit_is_another_checksum(dtype: torch.dtype) -> None:
    tensor = (torch.arange(1000) % 97 - 48).to(dtype)
    before = checksum(tensor)
    assert before.startswith(str(dtype).removeprefix("torch.") + ":")
    tensor.view(torch.uint8)[1234] ^= 1
    assert checksum(tensor) != before


def test_changes_that_cancel_out_as_numbers_do_not_as_bits() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.5])
    assert checksum(one) != checksum(other)


def test_parts_add_up_to_the_whole_and_zeros_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([whole, torch.zeros(2, 5)])
    assert added([checksum(whole[:2]), checksum(whole[2:])]) == checksum(whole) == checksum(padded)
    assert checksum(whole.T) == checksum(whole)
    assert added([checksum(whole), checksum(whole.bfloat16())]) == ""


@pytest.mark.gpu
def test_a_gpu_computes_the_same_checksum() -> None:
    tensor = torch.randn(2**23, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert checksum(tensor.cuda()) == checksum(tensor)
