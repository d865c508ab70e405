"""Trains for a long time and looks at what every process holds: `make soak`.

    PYTHONPATH=tests python -m soak --steps 2000                     both storages, with and without chaos
    PYTHONPATH=tests python -m soak --steps 300 --storage simple --calm

A figure that grows over its limit per 1,000 steps fails the command. Chaos stops a random process of the run for up to
a second, every few steps.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from e2e.runs import MODES
from soak.processes import Sample, held_up, sampled
from soak.slopes import LIMITS, slope

from tqppo.metrics import files as metrics

SMALLEST = [
    "model.hidden_size=16", "model.num_layers=1", "data.batch_size=2", "rollout.group_size=2",
    "actor.mini_batch_size=2", "checkpoint.interval=50", "checkpoint.keep_last=1", "validation.num_prompts=2",
    "validation.interval=50",
]  # fmt: skip
CHAOS_EVERY_S = 5.0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--samples", type=int, default=60)
    options.add_argument("--storage", choices=["simple", "ray"], action="append")
    options.add_argument("--calm", action="store_true", help="without chaos only")
    options.add_argument("--timeout", type=float, default=6 * 3600, help="seconds for each run")
    chosen = options.parse_args()
    failed = 0
    for storage in chosen.storage or ["simple", "ray"]:
        for is_chaotic in (False,) if chosen.calm else (False, True):
            failed += soak(storage, chosen.steps, chosen.samples, chosen.timeout, is_chaotic=is_chaotic)
    return min(failed, 1)


def soak(storage: str, steps: int, samples: int, timeout_s: float, *, is_chaotic: bool) -> int:
    """One run. Prints its table; returns how many figures grow, or 1 if the run itself failed."""
    print(f"\n== {storage}, {'with' if is_chaotic else 'without'} chaos, {steps} steps", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tqppo-soak-"))
    process = _start(folder, storage, steps)
    try:
        taken = _watch(process, folder, steps, samples, timeout_s, random.Random(0) if is_chaotic else None)
        code = process.wait(timeout=600)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
        said = (folder / "output.txt").read_text()
        shutil.rmtree(folder, ignore_errors=True)
    if code:
        print(f"the run ended with {code}:\n{said[-2000:]}")
        return 1
    return report(taken)


def _start(folder: Path, storage: str, steps: int) -> subprocess.Popen[bytes]:
    (folder / "grpo.toml").write_text(MODES["grpo"])
    settings = [f"storage.backend={storage}", f"run.max_steps={steps}", *SMALLEST]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "tqppo", "train", "--config", "grpo.toml", "--name", "soak", *words]
    environment = {**os.environ, "TQPPO__RUN__DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, steps: int, samples: int, timeout_s: float,
    rng: random.Random | None,
) -> list[tuple[int, Sample]]:  # fmt: skip
    """Take a sample every few steps until the run ends."""
    taken: list[tuple[int, Sample]] = []
    written, every = folder / "runs" / "soak" / "metrics.jsonl", max(1, steps // samples)
    deadline, chaos_at = time.monotonic() + timeout_s, time.monotonic()
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        done = len(metrics.read(written)) if written.exists() else 0
        if done >= (taken[-1][0] if taken else 0) + every:
            taken.append((done, sampled(process.pid)))
        if rng is not None and taken and time.monotonic() > chaos_at + CHAOS_EVERY_S:
            chaos_at = time.monotonic()
            with held_up(process.pid, rng):
                pass
    return taken


def report(taken: list[tuple[int, Sample]]) -> int:
    """Print a line per process and figure that moves; returns how many grow over their limit."""
    names = dict.fromkeys(key for _, sample in taken for key in sample)
    growing = 0
    print(f"{len(taken)} samples, steps {taken[0][0] if taken else 0} to {taken[-1][0] if taken else 0}")
    for name, figure in names:
        points = [(step, sample[name, figure]) for step, sample in taken if (name, figure) in sample]
        found = slope([step for step, _ in points], [value for _, value in points])
        if found is None:
            continue
        grows = found.grows(LIMITS[figure])
        growing += grows
        if grows or figure == "rss_mb":
            print(
                f"{name[:44]:44} {figure:11} {points[-1][1]:9.1f}  {found.per_1000:+9.2f} ± {found.error:.2f} "
                f"per 1,000 steps  {'GROWS' if grows else 'ok'}"
            )
    print(f"{growing or 'no'} figures grow", flush=True)
    return growing


if __name__ == "__main__":
    sys.exit(main())
