"""Ranks that share rows compute what ranks with rows of their own do: results, loss, metrics and gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_parts import all_parts
from workers.compute.context_ranks import CASES, LAYOUTS

RANKS = Path(__file__).with_name("context_ranks.py")
TESTS = RANKS.parents[2]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    command = [sys.executable, str(RANKS), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_ranks_that_share_rows_compute_what_one_rank_does(left: Path, layout: str, case: str) -> None:
    (alone,), several = said(left / "1" / case), said(left / layout / case)
    size, context = LAYOUTS[layout]
    assert len(several) == size
    for rank, each in enumerate(several):
        assert each["results"].keys() == several[rank - rank % context]["results"].keys(), "neighbours have one shard"
        for row, values in each["results"].items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(alone["results"][row]), rtol=0, atol=1e-5)
        assert each["metrics"].keys() == alone["metrics"].keys()
        for name, value in each["metrics"].items():
            assert value == pytest.approx(alone["metrics"][name], rel=1e-4, abs=1e-6), name
    expected, found = all_parts(left / "1" / case, "optimizer"), all_parts(left / layout / case, "optimizer")
    gradients = [name for name in expected if name.startswith("exp_avg.")]
    assert max(float(expected[name].abs().max()) for name in gradients) > 1e-3
    for name in gradients:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def said(folder: Path) -> list[dict[str, dict[str, float]]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]
