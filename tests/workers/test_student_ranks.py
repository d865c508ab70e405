"""Students on several ranks (FSDP, gloo) compute what one does, for every loss and update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_parts import all_parts
from workers import students_on_ranks
from workers.conftest import rows_of
from workers.taught import CASES, Class

SCRIPT = Path(__file__).with_name("students_on_ranks.py")
ALL = [":".join((*case, "float32")) for case in CASES]
SOME = [
    "k1:policy_gradient:float32",
    "k3:supervised:float32",
    "forward_kl_topk:supervised:float32",
    "forward_kl:supervised:float32",
    "reverse_kl:supervised:bfloat16",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for all ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    school = Class.create(folder)
    rows = school.score(rows_of([3, 9, 1, 5, 2, 7], [4, 1, 7, 12, 3, 9], seed=4))
    torch.save({"school": (school.student, school.teachers), "rows": rows}, folder / "rows.pt")
    return folder


def compare(folder: Path, size: int, cases: list[str]) -> None:
    """Run these cases on `size` ranks and on one, in this process; metrics and gradients agree."""
    commands = [[sys.executable, str(SCRIPT), str(folder), str(rank), str(size), *cases] for rank in range(size)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    students_on_ranks.main(folder, 0, 1, cases)
    errors = [process.communicate(timeout=900)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)
    for case in cases:
        one, several = (json.loads((folder / f"{n}-{case}.json").read_text()) for n in (1, size))
        relative, absolute = (1e-5, 1e-6) if case.endswith("float32") else (0.1, 0.02)
        assert several == pytest.approx(one, rel=relative, abs=absolute), case
        states = [all_parts(folder / f"{n}-{case}", "optimizer") for n in (1, size)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, atol=absolute, rtol=10 * relative)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(folder: Path) -> None:
    compare(folder, 2, SOME)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_every_loss_is_the_same_on_any_number_of_ranks_even_if_one_has_no_rows(folder: Path, size: int) -> None:
    compare(folder, size, ALL)
