"""Damaged and hostile files by the thousand, through the functions that read them: `make fuzz`.

PYTHONPATH=tests python -m fuzz --cases 10000            every target, each in a process of its own
PYTHONPATH=tests python -m fuzz configs --case 17         one case again, with its stack and its files
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fuzz.folder_targets import Manifests, Models, QueueSnapshots
from fuzz.run import Target, folder_of_cases, run
from fuzz.text_targets import Configs, JsonLines, Parquets, ToolTexts

TARGETS: dict[str, Callable[[Path], Target]] = {
    each.name: each for each in (Configs, JsonLines, Parquets, Manifests, QueueSnapshots, Models, ToolTexts)
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", nargs="*", choices=[[], *TARGETS], default=[])
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--case", type=int, help="run this one again")
    chosen = options.parse_args()
    names = chosen.target or list(TARGETS)
    if len(names) > 1:
        command = [sys.executable, "-m", "fuzz", "--cases", str(chosen.cases), "--seed", str(chosen.seed)]
        return max(subprocess.run([*command, name]).returncode != 0 for name in names)
    numbers = range(chosen.cases) if chosen.case is None else range(chosen.case, chosen.case + 1)
    return fuzz(names[0], chosen.seed, numbers)


def fuzz(name: str, seed: int, numbers: range) -> int:
    """Run one target and print what it found. Returns how many different problems there are."""
    with folder_of_cases() as folder:
        found = run(TARGETS[name](folder), seed, numbers)
        print(
            f"{name:10} {found.cases:6} cases, {found.refused:6} refused, {found.seconds:6.1f} s, "
            f"{found.growth_bytes >> 20:5} MB more: {len(found.problems) or 'no'} problems",
            flush=True,
        )
        for what, (number, stack) in found.problems.items():
            times = found.counts[what.partition(": ")[0]]
            print(f"  {what}\n    {times} times; again: PYTHONPATH=tests python -m fuzz {name} --case {number}")
            if len(numbers) == 1:
                print(stack)
        if len(numbers) == 1:
            print(f"its files: {_kept(folder)}")
    return len(found.problems)


def _kept(folder: Path) -> Path:
    kept = folder.with_name(f"{folder.name}-kept")
    os.rename(folder, kept)
    return kept


if __name__ == "__main__":
    sys.exit(min(main(), 1))
