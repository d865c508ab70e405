"""Runs a cell: a small run that is hit once, and a verdict on how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from e2e.runs import MODES, family, living
from faults.matrix.cells import HOLD_S, RANKS, TITLES, Cell, inject, undo
from faults.matrix.records import Outcome

from tqppo.errors import CheckpointError
from tqppo.metrics import files as metrics
from tqppo.processes.reaper import LOCK
from tqppo.run.checkpoint import CheckpointStore
from tqppo.weights.location import PREFIX as WEIGHTS

STEPS = 3
START_S, DEADLINE_S, CLEAN_S = 600.0, 120.0, 60.0
SETTINGS = [
    f"run.max_steps={STEPS}", "warm_start.steps=0", "model.hidden_size=16", "model.num_layers=1",
    "validation.interval=1",
]  # fmt: skip
REWARD = """
def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 + 0.01 * len(solution_str)
"""
OWN_MEMORY = 'mount -t tmpfs -o size=64m none /dev/shm; exec "$0" "$@"'
BAD = re.compile(r"Traceback|probably a bug in tqppo")


def run_cell(cell: Cell, *, deadline_s: float = DEADLINE_S) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="tqppo-fault-"))
    deadline_s *= cell.patience
    process = _start(cell, folder)
    relatives: list[psutil.Process] = []
    try:
        is_there = _until(lambda: (folder / "at.json").exists() or process.poll() is not None, START_S)
        if not is_there or process.poll() is not None:
            why = "ended before the fault" if is_there else f"did not reach the fault within {START_S:.0f} s"
            return Outcome(cell, False, process.poll(), 0.0, f"it {why}: {_end_of(folder)}")
        relatives = family(process)
        began, victim = time.monotonic(), _victim(cell, process, relatives, folder)
        inject(cell, victim)
        (folder / "go").touch()
        if cell.is_driver and cell.how == "STOP":
            time.sleep(HOLD_S)
            undo(cell, victim)
        relatives += [each for each in _family_if_alive(process) if each not in relatives]
        ended = _until(lambda: process.poll() is not None, deadline_s)
        seconds = time.monotonic() - began
        problems = [] if ended else [f"it did not end within {deadline_s:.0f} s"]
        problems += _problems(cell, process.poll(), folder) if ended else []
        problems += _left_behind(relatives)
        return Outcome(cell, not problems, process.poll(), seconds, "; ".join(problems) or _message(folder))
    except LookupError as error:
        return Outcome(cell, False, None, 0.0, str(error))
    finally:
        _end(process, relatives)
        shutil.rmtree(folder, ignore_errors=True)


def _start(cell: Cell, folder: Path) -> subprocess.Popen[str]:
    config = folder / f"{cell.mode}.toml"
    config.write_text(MODES[cell.mode])
    (folder / "reward.py").write_text(REWARD)
    words = [word for setting in [*SETTINGS, *cell.settings] for word in ("--set", setting)]
    command = [sys.executable, "-m", "faults.matrix.driver", cell.when, str(folder)]
    command += ["train", "--config", config.name, "--name", "cell", "--no-probe", *words]
    if cell.has_own_memory:
        command = ["unshare", "-m", "sh", "-c", OWN_MEMORY, *command]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TQPPO__RUN__DIR": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def _victim(
    cell: Cell, process: subprocess.Popen[str], relatives: list[psutil.Process], folder: Path
) -> psutil.Process:
    if cell.is_driver:
        return psutil.Process(process.pid)
    if cell.who in RANKS:
        return psutil.Process(json.loads((folder / "at.json").read_text())[RANKS[cell.who]])
    for relative in relatives:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = relative.cmdline()
            if any(name in word for word in words[:4] for name in TITLES[cell.who]):
                return relative
    raise LookupError(f"no process of the run is the {cell.who}: {[each.name() for each in relatives]}")


def _problems(cell: Cell, code: int | None, folder: Path) -> list[str]:
    """What is wrong with how the run ended."""
    if cell.is_killed:
        return _lost(folder)
    output = (folder / "output.txt").read_text()
    found = [f"it says {match[0]!r}: {_end_of(folder)}" for match in [BAD.search(output)] if match]
    written = folder / "runs" / "cell" / "metrics.jsonl"
    done = max((int(row["step"]) for row in metrics.read(written)), default=0) if written.exists() else 0
    if code == 0 and done != STEPS:
        found.append(f"it ended with 0 after {done} of {STEPS} steps")
    if code != 0 and cell.must_survive:
        found.append(f"it ended with {code}: {_end_of(folder)}")
    if code not in (0, 1, 4, 6):
        found.append(f"its exit code is {code}")
    if code and "error: " not in output:
        found.append("it gives no reason")
    return found + _lost(folder)


def _lost(folder: Path) -> list[str]:
    """A checkpoint is there and whole, because the fault comes after the first step."""
    try:
        CheckpointStore(folder / "runs" / "cell" / "checkpoints").newest()
    except CheckpointError as error:
        return [f"lost: {error}"]
    return []


def _left_behind(relatives: list[psutil.Process]) -> list[str]:
    """Processes that still run, and folders in /tmp and /dev/shm that one of them owned."""
    _until(lambda: not living(relatives), CLEAN_S)
    pids = {relative.pid for relative in relatives}
    _until(lambda: not _folders_of(pids), 10.0)
    return [f"left: {each}" for each in (*living(relatives), *_folders_of(pids))]


def _folders_of(pids: set[int]) -> list[str]:
    """Folders whose lock file names one of the processes, and published weights with its number in their name."""
    parents = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    found = [str(path) for parent in parents for pid in pids for path in parent.glob(f"{WEIGHTS}{pid}-*")]
    for parent in parents:
        for lock in parent.glob(f"tqppo-*/{LOCK}"):
            with contextlib.suppress(OSError, ValueError):
                if int(lock.read_text()) in pids:
                    found.append(str(lock.parent))
    return sorted(set(found))


def _message(folder: Path) -> str:
    lines = [line for line in (folder / "output.txt").read_text().splitlines() if "error: " in line]
    return lines[-1].strip()[:160] if lines else "the run finished"


def _end_of(folder: Path) -> str:
    return " | ".join((folder / "output.txt").read_text().strip().splitlines()[-4:])[-400:]


def _family_if_alive(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return family(process)
    return []


def _end(process: subprocess.Popen[str], relatives: list[psutil.Process]) -> None:
    """End what a cell left, so that the next one is not disturbed by it."""
    for each in [*relatives, *_family_if_alive(process)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
