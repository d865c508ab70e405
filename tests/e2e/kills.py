"""Kills the driver of a run at random moments, and resumes it: `python kills.py FOLDER MODE WHERE KILLS SEED`.

WHERE is `alone` (a run in one process), or a storage, with Ray. Every other kill comes in the middle of a save, the
others anywhere in a step. It prints where each came, then whether the bytes are those of a run that was left in peace.
Attempts are forks of this process, which has imported everything: alone, they cost a second. `test_kills` runs this.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from e2e.runs import MODES

import tqppo.run.build
import tqppo.run.one_process  # noqa: F401 - imported before the forks
from tqppo.config.compile import compile_config
from tqppo.errors import TqppoError
from tqppo.metrics import files as metrics
from tqppo.run import start

STEPS = 24
SETTINGS = [f"run.max_steps={STEPS}", "model.hidden_size=16", "model.num_layers=1", "checkpoint.interval=2"]
PLACES = {
    "alone": ["cluster.in_process=true"],
    "simple": ['storage.backend="simple"'],
    "ray": ['storage.backend="ray"'],
}
SAVE_S = 0.01  # after a save began, the kill comes within so much
WAIT_S = 300.0


def forked(work: Callable[[], int]) -> int:
    """The pid of a child that runs `work` and ends with its exit code. It says nothing unless it fails."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work()
    except TqppoError as error:
        print(error, file=sys.__stderr__)
    except BaseException:  # noqa: BLE001 - the child must not go on as a second parent
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """The exit code of a child, minus the signal that ended it; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


class Run:
    def __init__(self, folder: Path, mode: str, where: str, name: str) -> None:
        self.config, self.path = folder / f"{mode}.toml", folder / "runs" / name
        self.config.write_text(MODES[mode])
        self.own = [f'run.dir="{folder / "runs"}"', f'run.name="{name}"', *SETTINGS, *PLACES[where]]

    def start(self) -> int:
        compiled = compile_config(None, [self.config], self.own, {})
        assert compiled.ok, compiled.diagnostics
        return forked(lambda: start.train(compiled, verbosity=-1))

    def resume(self) -> int:
        return forked(lambda: start.resume(str(self.path), [], verbosity=-1))

    def lines(self) -> int:
        path = self.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_saving(self) -> bool:
        return any((self.path / "checkpoints").glob(".partial-*/*"))

    def result(self) -> tuple[bytes, dict[str, bytes]]:
        saved = sorted((self.path / "checkpoints").glob("step_*"))[-1]
        files = [*saved.rglob("*.safetensors"), *(self.path / "export").rglob("*.safetensors")]
        return metrics.comparable(self.path / "metrics.jsonl"), {path.name: path.read_bytes() for path in files}


def kill(run: Run, child: int, rng: random.Random, *, in_save: bool) -> str:
    """Kill the attempt at a random moment after its first step; says where it was, or how it ended before."""
    before, deadline = run.lines(), time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (code := ended(child)) is not None:
            return f"ended with {code}"
        if run.is_saving() if in_save else run.lines() != before:
            break
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, SAVE_S if in_save else 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"killed {'in a save' if run.is_saving() else 'in a step'}, with {run.lines()} lines"


def main(folder: Path, mode: str, where: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    whole, run = Run(folder, mode, where, "whole"), Run(folder, mode, where, "killed")
    assert os.waitstatus_to_exitcode(os.waitpid(whole.start(), 0)[1]) == 0
    child = run.start()
    for count in range(kills):
        print(said := kill(run, child, rng, in_save=count % 2 == 1), flush=True)
        if said.startswith("ended") or not (run.path / "checkpoints" / "latest").exists():
            shutil.rmtree(run.path)  # it is through, or has nothing to go on from: once more from the start
            child = run.start()
        else:
            child = run.resume()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"resumed to the end: {code}, {'the same' if run.result() == whole.result() else 'OTHER'} bytes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
