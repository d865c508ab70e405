"""The matrix of faults, with real processes: `make faults`.

PYTHONPATH=tests python -m faults.matrix --list
PYTHONPATH=tests python -m faults.matrix --who actor --how KILL
PYTHONPATH=tests python -m faults.matrix --write docs/faults.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from faults.matrix.cells import all_cells
from faults.matrix.run import DEADLINE_S, Outcome, run_cell

HEADER = """# Faults

Each line is a run of three steps with real processes, in which one process is hit once, in its second step.
`make faults` runs them all and writes this page. A cell is right if the run ends within its deadline with its result,
or with a message and an exit code that fits; if its last checkpoint can be read; and if no process, folder or shared
memory is left behind.

| who | when | how | ends | after | what it says |
|---|---|---|---|---|---|
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("who", "when", "how"):
        options.add_argument(f"--{name}", action="append")
    options.add_argument("--list", action="store_true", help="print the cells, and run none")
    options.add_argument("--write", type=Path, help="write the table here")
    options.add_argument("--deadline", type=float, default=DEADLINE_S)
    chosen = options.parse_args()
    filters = {name: getattr(chosen, name) for name in ("who", "when", "how")}
    wanted = {name: values for name, values in filters.items() if values}
    cells = [cell for cell in all_cells() if all(getattr(cell, name) in wanted[name] for name in wanted)]
    if chosen.list:
        print("\n".join(map(str, cells)), f"\n{len(cells)} cells")
        return 0
    outcomes = []
    for cell in cells:
        outcomes.append(run_cell(cell, deadline_s=chosen.deadline))
        print(line(outcomes[-1]), flush=True)
    if chosen.write:
        chosen.write.write_text(HEADER + "".join(f"{line(each)}\n" for each in outcomes))
    wrong = sum(not each.is_right for each in outcomes)
    print(f"{len(outcomes)} cells, {wrong or 'none'} of them wrong")
    return min(wrong, 1)


def line(outcome: Outcome) -> str:
    cell = outcome.cell
    ends = "right" if outcome.is_right else "WRONG"
    said = outcome.said.replace("|", "/").replace("\n", " ")
    return f"| {cell.who} | {cell.when} | {cell.how} | {ends}, exit {outcome.code} | {outcome.seconds:.0f} s | {said} |"


if __name__ == "__main__":
    sys.exit(main())
