"""A learner's state on disk: each rank saves its rows, and any number of ranks goes on from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_parts import all_parts

from tqppo.space import Digest

RANKS = Path(__file__).with_name("saving_ranks.py")
TESTS = RANKS.parents[2]


@pytest.mark.slow
def test_state_goes_from_1_to_2_to_4_ranks_and_back_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(RANKS), str(tiny_model), str(tmp_path)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    for kind in ("model", "optimizer"):
        first = all_parts(tmp_path / "0", kind)
        assert first
        for turn in (1, 2, 3):
            other = all_parts(tmp_path / str(turn), kind)
            assert first.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in first.items())
        assert (tmp_path / "0" / f"{kind}.safetensors").read_bytes() == (
            tmp_path / "3" / f"{kind}.safetensors"
        ).read_bytes()
    for turn, size in enumerate((1, 2, 4, 1)):
        check_files(tmp_path, turn, size)


def check_files(folder: Path, turn: int, size: int) -> None:
    """Every file was written by one rank, which has its hash; the parts are of about the same size."""
    said = [json.loads((folder / f"{turn}-{rank}.json").read_text()) for rank in range(size)]
    names = [name for each in said for name in each]
    assert sorted(names) == sorted(path.name for path in (folder / str(turn)).iterdir())
    for each in said:
        for name, digest in each.items():
            assert Digest(**digest) == Digest.of(folder / str(turn) / name), name
    sizes = [path.stat().st_size for path in (folder / str(turn)).glob("model*")]
    assert len(sizes) == size
    assert max(sizes) < 1.3 * min(sizes)
