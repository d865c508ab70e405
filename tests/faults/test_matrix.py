"""The matrix of faults: whole in `make test-long`, which takes a minute per cell."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from e2e.runs import wait_until
from faults.matrix.__main__ import line
from faults.matrix.cells import TEACHER, WHEN, WHO, Cell, all_cells, inject, undo
from faults.matrix.run import Outcome, run_cell


def test_everyone_is_killed_and_stopped_at_every_time() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells)) >= 60
    killed = {(each.who, each.when) for each in cells if each.how == "KILL"}
    assert killed >= {(who, when) for who in WHO for when in WHEN}
    assert {who for who, _ in killed} == {*WHO, TEACHER}
    assert {each.how for each in cells} == {"KILL", "STOP", "full disk", "full /dev/shm", "few descriptors"}


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
    assert shown == "| index | update | KILL | WRONG, exit 1 | 3 s | left: 12 a/b |"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_a_fault_ends_in_a_result_or_a_message_with_nothing_lost_or_left(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert outcome.is_right, line(outcome)
