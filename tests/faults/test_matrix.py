"""The matrix of faults: a sample here, whole in `make test-long`, which takes a minute per cell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.runs import wait_until
from faults.matrix import __main__ as matrix
from faults.matrix.cells import ALONE, ITS_REWARD, SERVERS, TEACHER, WHEN, WHO, Cell, all_cells, inject, undo
from faults.matrix.records import Outcome, Records, line, version
from faults.matrix.run import run_cell


def test_everyone_is_killed_and_stopped_at_every_time() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells)) >= 60
    killed = {(each.who, each.when) for each in cells if each.how == "KILL"}
    assert killed >= {(who, when) for who in (*WHO, ALONE) for when in WHEN}
    assert {who for who, _ in killed} == {*WHO, ALONE, ITS_REWARD, TEACHER, *SERVERS}
    assert {each.how for each in cells} == {"KILL", "STOP", "full disk", "full /dev/shm", "few descriptors"}


ROOT = Path(__file__).parents[2]
PATIENT = """
import os, sys
for line in sys.stdin:
    try:
        open(os.devnull).close()
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.mark.timeout(60)
def test_a_fault_reaches_a_process_that_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", PATIENT], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = psutil.Process(process.pid)

        def answer() -> str:
            print(file=process.stdin, flush=True)
            return str(process.stdout.readline().strip())  # type: ignore[union-attr]

        try:
            assert answer() == "ok"
            stop = Cell("actor", "update", "STOP")
            inject(stop, seen)
            wait_until(lambda: seen.status() == psutil.STATUS_STOPPED, "the process to stop", timeout_s=20)
            undo(stop, seen)
            assert answer() == "ok"
            inject(Cell("actor", "update", "few descriptors"), seen)
            assert answer() == "24"  # EMFILE
            inject(Cell("actor", "update", "KILL"), seen)
            assert process.wait(timeout=20) == -9
        finally:  # leaving the `with` waits for it
            process.kill()


def test_a_wrong_cell_shows_in_the_table() -> None:
    cell = Cell("index", "update", "KILL")
    shown = line(Outcome(cell, False, 1, 3.2, "left: 12 a|b"))
    assert shown == "| index | update | KILL | WRONG, 1 | 3 s | left: 12 a/b |"
    said = "error: rollout-0 is process 10595 on node 053e63f9bebc3e92, /dev/shm/tqppo-weights-1-a/v3/x has 25276112896"
    shown = line(Outcome(cell, True, 1, 3.2, said))
    assert shown.endswith("| error: rollout-0 is process … on node …, …/v3/x has … |")


def test_cells_that_were_right_are_not_run_again_until_the_program_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Cell] = []

    def run_cell(cell: Cell, *, deadline_s: float) -> Outcome:
        ran.append(cell)
        return Outcome(cell, cell.when != "save", 1, 2.0, "error: as it should")

    monkeypatch.setattr(matrix, "run_cell", run_cell)
    records, wrote = tmp_path / "records", tmp_path / "faults.md"
    options = ["--who", ALONE, "--how", "KILL", "--records", str(records), "--write", str(wrote)]

    def run(*more: str) -> tuple[int, set[str]]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["faults.matrix", *options, *more])
        return matrix.main(), {cell.when for cell in ran}

    assert run() == (1, set(WHEN))
    assert run() == (1, {"save"})  # it was wrong, and is tried again
    assert f"6 cells, 1 of them wrong; {len(all_cells()) - 6} more have not been run." in wrote.read_text()
    monkeypatch.setattr(matrix, "version", lambda: "another")
    assert run("--minutes", "0") == (0, set())
    assert "6 cells are left" in capsys.readouterr().out
    assert run("--any-version") == (1, {"save"})
    assert run() == (1, set(WHEN))


def test_the_version_is_that_of_the_program_and_the_page_is_of_known_cells() -> None:
    assert version() == version()
    known = Records(ROOT / "nothing").read()
    assert known == {}
    text = (ROOT / "docs" / "faults.md").read_text()
    shown = re.findall(r"^\| ([^|]+) \| (\w+) \| ([^|]+) \| (WRONG, )?-?\d+ \|", text, re.M)
    assert {Cell(*row[:3]) for row in shown} <= set(all_cells())
    assert len(shown) >= 60
    assert not [row for row in shown if row[3]], "a cell on the page is wrong"


SAMPLE = [
    Cell(ALONE, "save", "KILL"),
    Cell(ALONE, "publish", "full disk"),
    Cell(ALONE, "update", "few descriptors"),
    Cell("actor", "update", "KILL"),
]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_sample_of_faults_ends_well(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert outcome.is_right, line(outcome)


CELLS = [
    pytest.param(cell, id=str(cell), marks=[pytest.mark.engines] if cell.needs_engines else [])
    for cell in all_cells()
    if cell not in SAMPLE
]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", CELLS)
def test_a_fault_ends_in_a_result_or_a_message_with_nothing_lost_or_left(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert outcome.is_right, line(outcome)
