"""The cells of the matrix: who is hit, when and how, and what may come of it."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass
from itertools import product

import psutil

WHEN = ("generation", "scoring", "update", "publish", "save", "validation")
RANKS = {"actor": "actor 0", "critic": "critic 0", "reference": "reference 0"}
TITLES = {
    "rollout worker": ("ray::RolloutWorker",),
    "estimator": ("ray::Estimator",),
    "index": ("ray::IndexActor",),
    "storage": ("ray::FileServer", "ray::ObjectKeeper"),
    "reward process": ("tqppo.rewards.process",),
    "raylet": ("raylet",),
    "GCS": ("gcs_server",),
}
WHO = ("driver", *RANKS, *TITLES)
TEACHER = "teacher"  # of distillation, which scores during generation
TITLES[TEACHER] = ("ray::TeacherWorker",)
HOLD_S = 5.0  # how long a driver is stopped: nobody ends a run because its terminal sleeps


@dataclass(frozen=True, slots=True)
class Cell:
    who: str
    when: str
    how: str

    def __str__(self) -> str:
        return f"{self.who} / {self.when} / {self.how}"

    @property
    def mode(self) -> str:
        return "distill" if self.who == TEACHER else "ppo"

    @property
    def must_survive(self) -> bool:
        """Whether the run has to finish: a driver that is only held up, and a reward process, which is replaced."""
        return (self.who, self.how) == ("driver", "STOP") or self.who == "reward process"

    @property
    def is_killed(self) -> bool:
        return (self.who, self.how) == ("driver", "KILL")


def all_cells() -> list[Cell]:
    """Kills and stops of everyone at every time, and full or used-up resources of the processes that need them."""
    cells = [Cell(who, when, how) for how, who, when in product(("KILL", "STOP"), WHO, WHEN)]
    cells += [Cell(who, "save", "full disk") for who in ("driver", "actor", "critic")]
    cells += [Cell("driver", "update", "full disk"), Cell("driver", "validation", "full disk")]
    cells += [Cell("rollout worker", "generation", "full /dev/shm"), Cell("actor", "publish", "full /dev/shm")]
    cells += [Cell(who, when, "few descriptors") for who in ("driver", "rollout worker", "actor") for when in WHEN]
    cells += [Cell(TEACHER, when, how) for how in ("KILL", "STOP") for when in WHEN if when != "scoring"]
    return cells


def inject(cell: Cell, process: psutil.Process) -> None:
    """Hit a process. Limits are set from outside, on the running process."""
    if cell.how in ("KILL", "STOP"):
        os.kill(process.pid, signal.SIGKILL if cell.how == "KILL" else signal.SIGSTOP)
    elif cell.how == "few descriptors":
        _limit(process, resource.RLIMIT_NOFILE, process.num_fds())
    else:  # a file that may not grow fails as one on a full file system
        _limit(process, resource.RLIMIT_FSIZE, 4096)


def _limit(process: psutil.Process, what: int, most: int) -> None:
    process.rlimit(what, (most, process.rlimit(what)[1]))


def undo(cell: Cell, process: psutil.Process) -> None:
    """Let a process that was stopped go on, so that it can end."""
    if cell.how == "STOP" and process.is_running():
        process.send_signal(signal.SIGCONT)
