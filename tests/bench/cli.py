"""How long the command line makes a user wait, as multiples of `python -c "import typer, rich"`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import interleaved, publish

BASE = "import typer, rich"
TQPPO = str(Path(sys.executable).with_name("tqppo"))
TABS = {
    "Tab: commands": "tqppo ",
    "Tab: options": "tqppo train --",
    "Tab: presets": "tqppo train --preset ",
    "Tab: settings": "tqppo train --set rollout.",
    "Tab: back ends": "tqppo train --set rollout.backend=",
    "Tab: runs": "tqppo resume ",
}
LIMIT = 3.0
BURST = 4  # runs per measurement: one takes a tenth of a second, the clock of CPU time ticks in hundredths


def process(command: list[str], folder: str, **environ: str) -> Callable[[], None]:
    def run() -> None:
        for _ in range(BURST):
            subprocess.run(command, cwd=folder, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, check=True)

    return run


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for step in range(3):
            Path(folder, f"runs/a-run/checkpoints/step_{step:06d}").mkdir(parents=True)
        alternatives = {BASE: process([sys.executable, "-c", BASE], folder)}
        alternatives["tqppo --help"] = process([TQPPO, "--help"], folder)
        for name, line in TABS.items():
            alternatives[name] = process([TQPPO], folder, _TQPPO_COMPLETE="bash", _TQPPO_LINE=line)
        validate = [TQPPO, "validate-config", "--preset", "quickstart"]
        alternatives["validate-config"] = process(validate, folder)
        timings = interleaved(alternatives, repeats=7)
    base = timings[BASE]
    figures = {
        name: {
            "cpu_ms": 1000 * timing.cpu / BURST,
            "wall_ms": 1000 * timing.wall / BURST,
            "cpu_ratio": timing.cpu / base.cpu,
            "wall_ratio": timing.wall / base.wall,
        }
        for name, timing in timings.items()
    }
    rows = [[name, f["cpu_ms"], f["wall_ms"], f["cpu_ratio"], f["wall_ratio"]] for name, f in figures.items()]
    header = ["command", "CPU ms", "wall ms", "CPU ratio", "wall ratio"]
    publish("cli", f"--help and Tab: under {LIMIT:g} times the import of typer and rich", header, rows, figures)
    slow = [name for name, f in figures.items() if f["cpu_ratio"] > LIMIT and name != "validate-config"]
    if slow:
        raise SystemExit(f"over {LIMIT:g} times the import: {', '.join(slow)}")


if __name__ == "__main__":
    main()
