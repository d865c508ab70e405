"""The cells of the matrix: who is hit, when and how, and what may come of it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass
from itertools import product

import psutil
from disks import can_mount

WHEN = ("generation", "scoring", "update", "publish", "save", "validation")
DRIVER, SECOND = "driver", "actor rank 1"
ALONE, ITS_REWARD = "the only process", "its reward process"  # of a run in one process
RANKS = {"actor": "actor 0", SECOND: "actor 1", "critic": "critic 0", "reference": "reference 0"}
TEACHER = "teacher"  # of distillation, which scores during generation
SERVERS = ("vLLM server", "SGLang server")  # the genuine ones, where `make engines` has been run
TITLES = {
    "rollout worker": ("ray::RolloutWorker",),
    "estimator": ("ray::Estimator",),
    "index": ("ray::IndexActor",),
    "storage": ("ray::ObjectKeeper",),  # of `ray`; on one node, `simple` has no process of its own
    "reward process": ("tqppo.rewards.process",),
    ITS_REWARD: ("tqppo.rewards.process",),
    "raylet": ("raylet",),
    "GCS": ("gcs_server",),
    TEACHER: ("ray::TeacherWorker",),
    "vLLM server": ("vllm",),
    "SGLang server": ("sglang",),
}
WHO = (DRIVER, *RANKS, *(each for each in TITLES if each not in (ITS_REWARD, TEACHER, *SERVERS)))
MODES = {TEACHER: "distill", "critic": "ppo", "reference": "ppo"}  # of others: grpo, which has the fewest processes
OF_WHO = {
    ALONE: ["cluster.in_process=true"],
    ITS_REWARD: ["cluster.in_process=true", "reward.function=reward.py:half"],
    SECOND: ["actor.ranks=2"],
    "reference": ["algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.01"],
    "reward process": ["reward.function=reward.py:half"],
    "storage": ["storage.backend=ray"],
    TEACHER: ["distillation.timeout_s=20"],
    "vLLM server": ["rollout.backend=vllm", "model.hidden_size=128"],  # servers need heads of 32
    "SGLang server": ["rollout.backend=sglang", "model.hidden_size=128"],
}
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
        return MODES.get(self.who, "grpo")

    @property
    def settings(self) -> list[str]:
        return OF_WHO.get(self.who, [])

    @property
    def is_driver(self) -> bool:
        """Whether the command itself is hit."""
        return self.who in (DRIVER, ALONE)

    @property
    def must_survive(self) -> bool:
        """Whether the run has to finish: a driver that is only held up, and a reward process, which is replaced."""
        return (self.is_driver and self.how == "STOP") or self.who in ("reward process", ITS_REWARD)

    @property
    def is_killed(self) -> bool:
        return self.is_driver and self.how == "KILL"

    @property
    def has_own_memory(self) -> bool:
        """Whether /dev/shm is a small file system of the run's own, to be filled. Ray wants gigabytes there."""
        return self.who == ALONE and self.how == "full /dev/shm" and can_mount()

    @property
    def needs_engines(self) -> bool:
        return self.who in SERVERS

    @property
    def patience(self) -> float:
        """How many times longer than others it may take: a server takes a minute to start again."""
        return 4.0 if self.needs_engines else 1.0


def all_cells() -> list[Cell]:
    """Kills and stops of everyone at every time, and full or used-up resources of the processes that need them."""
    both = ("KILL", "STOP")
    cells = [Cell(ALONE, when, how) for how, when in product((*both, "few descriptors"), WHEN)]
    cells += [Cell(ITS_REWARD, when, how) for how, when in product(both, WHEN)]
    cells += [Cell(ALONE, when, "full /dev/shm") for when in WHEN]
    cells += [Cell(ALONE, when, "full disk") for when in ("generation", "update", "publish", "save", "validation")]
    cells += [Cell(who, when, how) for how, who, when in product(both, WHO, WHEN)]
    cells += [Cell(who, "save", "full disk") for who in (DRIVER, "actor", "critic")]
    cells += [Cell(DRIVER, "update", "full disk"), Cell(DRIVER, "validation", "full disk")]
    cells += [Cell("rollout worker", "generation", "full /dev/shm"), Cell("actor", "publish", "full /dev/shm")]
    cells += [Cell(who, when, "few descriptors") for who in (DRIVER, "rollout worker", "actor") for when in WHEN]
    cells += [Cell(TEACHER, when, how) for how in both for when in WHEN if when != "scoring"]
    return cells + [Cell(who, when, how) for how in both for who in SERVERS for when in ("generation", "publish")]


def inject(cell: Cell, process: psutil.Process) -> None:
    """Hit a process. Limits are set from outside, on the running process."""
    if cell.how in ("KILL", "STOP"):
        os.kill(process.pid, signal.SIGKILL if cell.how == "KILL" else signal.SIGSTOP)
    elif cell.has_own_memory:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{process.pid}/root/dev/shm/filler", "wb", buffering=0) as filler,
        ):
            while True:
                filler.write(bytes(4096))
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
