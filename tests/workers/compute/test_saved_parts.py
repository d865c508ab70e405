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


def save_in_turns(model: Path, folder: Path, *turns: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(RANKS), str(model), str(folder), *turns]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr


def assert_same_bits(folder: Path, one: int, others: tuple[int, ...]) -> None:
    for kind in ("model", "optimizer"):
        first = all_parts(folder / str(one), kind)
        assert first
        for turn in others:
            other = all_parts(folder / str(turn), kind)
            assert first.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.slow
def test_state_goes_from_1_to_2_to_4_ranks_and_back_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    save_in_turns(tiny_model, tmp_path, "1/0/-1", "2/0/0", "4/0/1", "1/0/2")
    assert_same_bits(tmp_path, 0, (1, 2, 3))
    for kind in ("model", "optimizer"):
        first, last = (tmp_path / turn / f"{kind}.safetensors" for turn in "03")
        assert first.read_bytes() == last.read_bytes()
    for turn, size in enumerate((1, 2, 4, 1)):
        check_files(tmp_path, turn, size)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_with_a_copy_each_learn_what_others_do_and_their_state_goes_anywhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Four ranks as two nodes of two: after two updates as four ranks with one copy, and as one rank."""
    save_in_turns(tiny_model, tmp_path, "1/0/-1", "4/0/-1", "4/2/-1", "4/0/2", "2/0/3", "4/2/4", "1/0/5")
    for kind in ("model", "optimizer"):
        alone, flat, mesh = (all_parts(tmp_path / turn, kind) for turn in "012")
        for name, value in mesh.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=5e-5)  # steps of 0.01
            torch.testing.assert_close(value, flat[name], rtol=1e-4, atol=5e-6)
    started = all_parts(tiny_model, "model")
    assert not torch.equal(started["model.norm.weight"], mesh_weight(tmp_path, "model.norm.weight"))
    assert_same_bits(tmp_path, 2, (3, 4, 5, 6))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "2").glob("model*"))]
    assert max(sizes[2:]) < 0.01 * min(sizes[:2]), "the second node has the same rows and writes none"


def mesh_weight(folder: Path, name: str) -> torch.Tensor:
    return all_parts(folder / "2", "model")[f"causal_lm.{name}"]


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
