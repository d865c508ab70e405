"""The matrix of faults, with real processes: `make faults`.

PYTHONPATH=tests python -m faults.matrix --list
PYTHONPATH=tests python -m faults.matrix --who actor --how KILL    cells without a record for the program as it is
PYTHONPATH=tests python -m faults.matrix --write docs/faults.md    the page, of all records
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from faults.matrix.cells import Cell, all_cells
from faults.matrix.records import RECORDS, Records, line, page, version
from faults.matrix.run import DEADLINE_S, run_cell


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("who", "when", "how"):
        options.add_argument(f"--{name}", action="append")
    options.add_argument("--list", action="store_true", help="print the cells, and run none")
    options.add_argument("--records", type=Path, default=RECORDS, help="where outcomes are kept")
    options.add_argument("--any-version", action="store_true", help="skip what is recorded for any version as right")
    options.add_argument("--no-engines", action="store_true", help="leave out what needs `make engines`")
    options.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so many")
    options.add_argument("--write", type=Path, help="write the page here")
    options.add_argument("--deadline", type=float, default=DEADLINE_S)
    chosen = options.parse_args()
    filters = {name: getattr(chosen, name) for name in ("who", "when", "how")}
    wanted = {name: values for name, values in filters.items() if values}
    cells = [cell for cell in all_cells() if all(getattr(cell, name) in wanted[name] for name in wanted)]
    cells = [cell for cell in cells if not (chosen.no_engines and cell.needs_engines)]
    if chosen.list:
        print("\n".join(map(str, cells)), f"\n{len(cells)} cells")
        return 0
    records = Records(chosen.records)
    wrong = _run(cells, records, "" if chosen.any_version else version(), chosen.deadline, chosen.minutes)
    if chosen.write:
        done = records.read()
        shown = [done[cell] for cell in all_cells() if cell in done]
        chosen.write.write_text(page(shown, len(all_cells()) - len(shown)))
    return min(wrong, 1)


def _run(cells: list[Cell], records: Records, wanted: str, deadline_s: float, minutes: float) -> int:
    """Run the cells that are not recorded as right for the wanted version; returns how many are wrong."""
    now, done = version(), records.read(wanted)
    left = [cell for cell in cells if cell not in done or not done[cell].is_right]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them done before", flush=True)
    wrong, end = 0, time.monotonic() + 60 * minutes
    for count, cell in enumerate(left):
        if time.monotonic() > end:
            print(f"{len(left) - count} cells are left for another time")
            break
        outcome = run_cell(cell, deadline_s=deadline_s)
        records.add(outcome, now)
        print(line(outcome), flush=True)
        wrong += not outcome.is_right
    print(f"{wrong or 'none'} of them wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
