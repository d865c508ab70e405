"""What the tiny presets learn, over seeds that no setting was chosen on: held-out accuracy, sampled and greedy.

python tests/bench/learning.py [PRESET …]      (default: quickstart ppo-tiny)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import publish

from tqppo.metrics import files as metrics

SEEDS = {"quickstart": (11, 12, 13), "ppo-tiny": (21, 22, 23)}
SAMPLED, GREEDY = "val-core/sort/acc/mean@1", "val-core/sort/acc/greedy"


def train(preset: str, seed: int, folder: Path) -> tuple[list[metrics.Line], float]:
    """The lines with a validation, and the seconds of the whole command."""
    began, name = time.perf_counter(), f"{preset}-{seed}"
    command = [sys.executable, "-c", "from tqppo.cli import app; app()", "train", "--preset", preset]
    command += ["--name", name, "--set", f"run.seed={seed}", "--set", f'run.dir="{folder}"', "-q"]
    subprocess.run(command, check=True)
    rows = metrics.read(folder / name / "metrics.jsonl")
    return [row for row in rows if GREEDY in row], time.perf_counter() - began


def main(presets: list[str]) -> None:
    table, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for preset in presets:
            for seed in SEEDS.get(preset, (11, 12, 13)):
                rows, seconds = train(preset, seed, Path(folder))
                first, last = rows[0], rows[-1]
                figures.append({"preset": preset, "seed": seed, "seconds": seconds, "before": first, "after": last})
                sampled = f"{first[SAMPLED]:.2f} → {last[SAMPLED]:.2f}"
                greedy = f"{first[GREEDY]:.2f} → {last[GREEDY]:.2f}"
                table.append([preset, seed, sampled, greedy, f"{seconds:.0f}"])
    title = "held-out accuracy before → after, start-up included in the seconds"
    publish("learning", title, ["preset", "seed", "sampled", "greedy", "seconds"], table, figures)


if __name__ == "__main__":
    main(sys.argv[1:] or ["quickstart", "ppo-tiny"])
