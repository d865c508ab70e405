"""Ends a rehearsed run at one line of our code after another: `python moments.py FOLDER HOW STRIDE FIRST`.

HOW is `kill` (SIGKILL) or `ctrl-c` (SIGINT twice). Resumed, a run must end in the bytes of one that was left in peace;
if it had no checkpoint yet, the resume must be refused. `test_moments` runs this.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from run.rehearsal import Rehearsal, left_behind

import tqppo
from tqppo.config.compilation import Compilation
from tqppo.errors import TqppoError
from tqppo.run import start
from tqppo.run.lock import RunLock

OURS = Path(tqppo.__file__).parent
WATCHED = {str(OURS / "space.py"), str(OURS / "metrics" / "files.py"), *map(str, (OURS / "run").glob("*.py"))}
BACKGROUND = "checkpoint.background=true"
STEPS = ("run.max_steps=3", "checkpoint.keep_last=9")


class Line:
    """Counts the lines of our code that this process runs, and acts at one of them."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.at, self.action, self.count = at, action, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.action()
        return self


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def in_a_child(work: Callable[[], int]) -> int:
    """The exit code of `work`, as the command line would have it; negative if a signal ended the process."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        code = work()
    except TqppoError as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


class Trial:
    """A command on the run `mine` that ends at a line, and the resume after it. `prepare` comes before the command."""

    def __init__(self, rehearsal: Rehearsal, prepare: Callable[[], object], command: Callable[[], int]) -> None:
        self.rehearsal, self.prepare, self.command = rehearsal, prepare, command
        self.run = rehearsal.runs / "mine"
        assert in_a_child(self._in_peace) == 0
        self.num_lines = int((rehearsal.runs / "lines").read_text())
        self.expected = rehearsal.result("mine")
        start.resumed_config(rehearsal.folder("mine"), [])  # so that it is compiled

    def _in_peace(self) -> int:
        line = Line(-1, killed)
        self.prepare()
        sys.settrace(line)
        code = self.command()
        sys.settrace(None)
        (self.rehearsal.runs / "lines").write_text(str(line.count))
        return code

    def end_at(self, at: int, action: Callable[[], None]) -> str:
        """What is wrong after the command was ended at this line; nothing, if all is well."""
        shutil.rmtree(self.run, ignore_errors=True)

        def work() -> int:
            self.prepare()
            sys.settrace(Line(at, action))
            return self.command()

        code = in_a_child(work)
        problems = [] if action is killed else self._after_an_abort(code)
        resumed = in_a_child(lambda: self.rehearsal.resume("mine"))
        if resumed == 5 and not list((self.run / "checkpoints").glob("step_*")):
            return "; ".join(problems)  # there is nothing to go on from
        if resumed != 0:
            problems.append(f"the resume ended with {resumed}")
        elif self.rehearsal.result("mine") != self.expected:
            problems.append("the resumed run ended in other bytes")
        return "; ".join(problems + left_behind(self.run))

    def _after_an_abort(self, code: int) -> list[str]:
        problems = [] if code in (0, 130) else [f"it ended with {code}"]
        steps = self.rehearsal.steps("mine") if (self.run / "metrics.jsonl").exists() else []
        if len(set(steps)) != len(steps):
            problems.append(f"lines are repeated: {steps}")
        return problems + [path for path in left_behind(self.run) if ".later-" not in path]


def remembering(compile_config: Callable[..., Compilation]) -> Callable[..., Compilation]:
    """Compile the same config once: most of a rehearsal's time would go there."""
    known: dict[object, Compilation] = {}

    def compiled(preset: str | None, files: list[Path], overrides: list[str], environ: dict[str, str]) -> Compilation:
        key = (preset, tuple(file.read_bytes() for file in files), tuple(overrides))
        if key not in known:
            known[key] = compile_config(preset, files, overrides, environ)
        return known[key]

    return compiled


def trials(folder: Path) -> dict[str, Trial]:
    fresh, earlier, behind = (Rehearsal(folder / name) for name in ("train", "resume", "background"))
    fresh.install()  # serves all
    compilation = fresh.compiled("mine", *STEPS)
    in_background = behind.compiled("mine", *STEPS, "run.max_steps=5", "checkpoint.interval=2", BACKGROUND)
    assert in_a_child(lambda: earlier.train("mine", *STEPS)) == 0
    (earlier.runs / "mine").rename(earlier.runs / "complete")

    def copy_complete() -> None:
        shutil.copytree(earlier.runs / "complete", earlier.runs / "mine", symlinks=True)

    return {
        "train": Trial(fresh, lambda: None, lambda: start.train(compilation)),
        "background": Trial(behind, lambda: None, lambda: start.train(in_background)),
        "resume": Trial(earlier, copy_complete, lambda: earlier.resume("mine/checkpoints/step_000001")),
    }


def main(folder: Path, how: str, stride: int, first: int) -> None:
    start.RunLock = partial(RunLock, settle_s=0.0)  # type: ignore[assignment,misc]
    start.compile_config = remembering(start.compile_config)
    terminal = sys.stdout
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    for what, trial in trials(folder).items():
        moments = range(first, trial.num_lines, stride)
        for at in moments:
            if problem := trial.end_at(at, killed if how == "kill" else interrupted):
                print(f"{what}, line {at} of {trial.num_lines}: {problem}", file=terminal, flush=True)
        print(f"{what}: {len(moments)} moments", file=terminal, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
