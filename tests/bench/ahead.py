"""What generation ahead of training gives and costs: seconds to an accuracy, and held-out accuracy after equal steps.

python tests/bench/ahead.py [SEED …]      (default: 11 to 15; `rollout.ahead` 0 and 1 in turn, on each seed)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from harness import publish

from tqppo.metrics import files as metrics

SEEDS = (11, 12, 13, 14, 15)
WANTED, OVER = 0.8, 10  # accuracy of sampled answers, over so many steps
SAMPLED, GREEDY = "val-core/sort/acc/mean@1", "val-core/sort/acc/greedy"


class Figures(TypedDict):
    ahead: int
    seed: int
    sampled: float  # held out, after the last step
    greedy: float
    steps_to: int  # to the wanted accuracy in training
    seconds_to: float  # from the first step on, validations included
    step_s: float  # median
    waiting_s: float  # of a step, for its groups
    generation_s: float  # median time of the engines for a step's groups, where they work ahead


def train(ahead: int, seed: int, folder: Path, settings: Sequence[str]) -> Figures:
    name = f"{ahead}-{seed}"
    command = [sys.executable, "-c", "from tqppo.cli import app; app()", "train", "--preset", "quickstart", "-q"]
    chosen = [f"rollout.ahead={ahead}", f"run.seed={seed}", f'run.dir="{folder}"', *settings]
    command += ["--name", name, *(word for each in chosen for word in ("--set", each))]
    subprocess.run(command, check=True)
    return figures(ahead, seed, metrics.read(folder / name / "metrics.jsonl"))


def figures(ahead: int, seed: int, lines: Sequence[metrics.Line]) -> Figures:
    steps, last = lines[1:], [line for line in lines if GREEDY in line][-1]
    scores = [number(line, "reward/acc/mean") for line in steps]
    reached = [i for i in range(OVER, len(steps) + 1) if statistics.fmean(scores[i - OVER : i]) >= WANTED]
    steps_to = reached[0] if reached else len(steps)
    began = number(lines[0], "time")
    return {
        "ahead": ahead,
        "seed": seed,
        "sampled": number(last, SAMPLED),
        "greedy": number(last, GREEDY),
        "steps_to": steps_to,
        "seconds_to": number(steps[steps_to - 1], "time") - began if reached else float("nan"),
        "step_s": statistics.median(number(line, "timing_s/step") for line in steps),
        "waiting_s": statistics.median(number(line, "timing_s/gen") for line in steps),
        "generation_s": statistics.median(number(line, "perf/generation_s") for line in steps) if ahead else 0.0,
    }


def number(line: metrics.Line, name: str) -> float:
    value = line[name]
    assert value is not None, f"{name} is not finite"
    return value


def row(of: Figures) -> list[object]:
    accuracies = f"{of['sampled']:.3f}", f"{of['greedy']:.3f}"
    seconds = f"{of['seconds_to']:.1f}", f"{of['step_s']:.4f}", f"{of['waiting_s']:.4f}"
    return [of["ahead"], of["seed"], *accuracies, of["steps_to"], *seconds]


def main(seeds: Sequence[int], settings: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = [train(ahead, seed, Path(folder), settings) for seed in seeds for ahead in (0, 1)]
    header = ["ahead", "seed", "held-out sampled", "greedy", f"steps to {WANTED}", "seconds", "s/step", "of it waiting"]
    table = [row(each) for each in found]
    seconds = [[each["seconds_to"] for each in found if each["ahead"] == ahead] for ahead in (0, 1)]
    step_s = [statistics.median(each["step_s"] for each in found if each["ahead"] == ahead) for ahead in (0, 1)]
    ratios = [alone / ahead for alone, ahead in zip(*seconds, strict=True)]
    title = (
        f"quickstart with rollout.ahead = 0 and 1: to {WANTED} in {statistics.median(ratios):.2f}x less time, "
        f"steps {step_s[0] / step_s[1]:.2f}x shorter (medians)"
    )
    publish("ahead", title, header, table, found)


if __name__ == "__main__":
    numbers = [word for word in sys.argv[1:] if word.isdecimal()]
    main([int(word) for word in numbers] or SEEDS, [word for word in sys.argv[1:] if "=" in word])
