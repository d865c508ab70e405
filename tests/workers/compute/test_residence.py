"""Workers that leave their device and return as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tqppo.workers.compute.residence import Residence

RANK = Path(__file__).with_name("resting_rank.py")


def test_tensors_give_their_memory_back_and_return_with_their_views() -> None:
    base = torch.arange(12.0)
    tensors = [base, base[4:].view(2, 4), torch.ones(3, dtype=torch.bfloat16)]
    expected, view = [tensor.clone() for tensor in tensors], base[:2]
    residence = Residence(torch.device("cpu"))
    for _ in range(2):
        residence.rest(tensors)
        assert residence.held_bytes(tensors) == 0
        residence.resume()
        assert residence.held_bytes(tensors) == 12 * 4 + 3 * 2
        assert all(torch.equal(found, was) for found, was in zip(tensors, expected, strict=True))
    assert view.tolist() == [0.0, 1.0]
    residence.resume()  # nothing is away


@pytest.mark.slow
def test_two_ranks_that_rest_between_updates_end_with_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(RANK), str(tiny_model), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors
    for name in (f"{kind}-0000{part}-of-00002.safetensors" for kind in ("model", "optimizer") for part in (1, 2)):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "rested" / name).read_bytes()


@pytest.mark.gpu
def test_tensors_that_rest_give_a_gpu_its_memory_back() -> None:
    device = torch.device("cuda")
    tensors = [torch.randn(2**24, device=device), torch.ones(2**22, dtype=torch.bfloat16, device=device)]
    expected, residence = [tensor.cpu() for tensor in tensors], Residence(device)
    before = torch.cuda.memory_reserved()
    residence.rest(tensors)
    assert torch.cuda.memory_reserved() <= before - 2**26
    residence.resume()
    assert all(torch.equal(found.cpu(), was) for found, was in zip(tensors, expected, strict=True))
