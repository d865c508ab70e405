"""Whole runs through the command line, in processes of their own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SMALL = """
[run]
max_steps = 6
[model]
path = "tiny"
[warm_start]
steps = 8
batch_size = 32
[data]
train = "task:sort"
task_args = { digits = 3, partial_credit = true }
size = 20
batch_size = 8
max_prompt_tokens = 16
[rollout]
group_size = 4
max_new_tokens = 6
[actor]
lr = 1e-3
mini_batch_size = 4
schedule = "linear"
[validation]
num_prompts = 16
[checkpoint]
interval = 1
"""
DISTILL = """
[distillation]
loss = "reverse_kl_topk"
top_k = 8
batch_rows = 8
[teachers.one]
path = "student"
prompt = "{prompt} {answer}"
"""
MODES = {
    "distill": 'mode = "distill"\n' + SMALL + DISTILL,
    "grpo": 'mode = "grpo"\n' + SMALL,
    "ppo": 'mode = "ppo"\n' + SMALL + '[algorithm]\nadvantage = "gae"\n[critic]\nlr = 2e-3\nmini_batch_size = 4\n',
}


class Cli:
    """`tqppo` with its runs in a folder of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.prefix: list[str] = []  # a command that runs the rest of its command line

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*self.prefix, sys.executable, "-c", "from tqppo.cli import app; app()", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "TQPPO__RUN__DIR": str(self.runs), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, timeout_s: float = 420) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == code, output
        return output

    def train(self, name: str, mode: str, *settings: str, code: int = 0) -> str:
        return self.run(*self.train_arguments(name, mode, *settings), code=code)

    def train_arguments(self, name: str, mode: str, *settings: str) -> list[str]:
        config = self.folder / f"{mode}.toml"
        config.write_text(MODES[mode])
        chosen = [word for setting in settings for word in ("--set", setting)]
        return ["train", "--config", str(config), "--name", name, *chosen]

    def weights(self, name: str) -> str:
        """SHA-256 of the exported weights."""
        return hashlib.sha256((self.runs / name / "export" / "hf" / "model.safetensors").read_bytes()).hexdigest()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process and everything it started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def living(processes: list[psutil.Process]) -> list[str]:
    """What still runs of them, by command line."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(
    condition: Callable[[], bool], what: str | Callable[[], str], *, timeout_s: float = 300, interval_s: float = 0.01
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        late = time.monotonic() >= deadline
        assert not late, f"waited {timeout_s} s for {what if isinstance(what, str) else what()}"
        time.sleep(interval_s)
