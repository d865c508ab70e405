"""What cells have shown, in a file that a later `make faults` goes on with: a line of JSON per cell."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from faults.matrix.cells import Cell

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / ".faults.jsonl"
PROGRAM = ("tqppo", "backends")
OF_ONE_RUN = re.compile(r"/\S*tqppo-\w+-\w+[^\s/]*|\b[0-9a-f]{12,}\b|(?<=process )\d+|(?<=pid=)\d+|\b\d{9,}\b")


@dataclass(frozen=True, slots=True)
class Outcome:
    cell: Cell
    is_right: bool
    code: int | None
    seconds: float  # from the fault to the end
    said: str


def version() -> str:
    """A hash of the program's own files: a change of tests or pages asks for no new run."""
    found = hashlib.sha256()
    for path in sorted(path for folder in PROGRAM for path in (ROOT / folder).rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


@dataclass
class Records:
    """The outcomes in a file; the last line of a cell counts."""

    path: Path

    def read(self, version: str = "") -> dict[Cell, Outcome]:
        """The last outcome of every cell, of this version only if one is given."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines]
        return {
            (cell := Cell(**row["cell"])): Outcome(**{**row["outcome"], "cell": cell})
            for row in rows
            if version in ("", row["version"])
        }

    def add(self, outcome: Outcome, version: str) -> None:
        fields = asdict(outcome)
        line = json.dumps({"version": version, "cell": fields.pop("cell"), "outcome": fields})
        with self.path.open("a") as file:
            file.write(f"{line}\n")


HEADER = """# Faults

Each line is a small run of three steps with real processes, in which one process is killed (KILL), stopped (STOP) or
starved, once, in its second step. A cell is right if the run ends within its deadline, with its result or with a
message and an exit code that fits; if its last checkpoint can be read; and if no process, folder or shared memory is
left behind. "Full" is a small file system that is filled, or with Ray a limit on the size of files, which fails alike;
"few descriptors" leaves the process no further one.

`make faults` runs the cells that it has no record of for the program as it is, and writes this page;
`FAULTS="--who actor --how KILL"` chooses some of them, and `tests/faults/matrix/cells.py` has them all. The seconds are
those from the fault to the end of the command, on two busy cores. "The only process" is that of
`tqppo train --in-process`; the others are those of a run with Ray.

"""
COLUMNS = "| who | when | how | exit | after | what it says |\n|---|---|---|---|---|---|\n"


def page(outcomes: Iterable[Outcome], missing: int) -> str:
    """The page of docs/ about these outcomes."""
    rows = list(outcomes)
    wrong = sum(not each.is_right for each in rows)
    summary = f"{len(rows)} cells, {wrong or 'none'} of them wrong"
    more = f"; {missing} more have not been run" if missing else ""
    return f"{HEADER}{summary}{more}.\n\n{COLUMNS}" + "".join(f"{line(each)}\n" for each in rows)


def line(outcome: Outcome) -> str:
    cell = outcome.cell
    ends = "" if outcome.is_right else "WRONG, "
    said = "nothing is lost or left" if cell.is_killed and outcome.is_right else outcome.said
    said = OF_ONE_RUN.sub("…", said.replace("|", "/").replace("\n", " "))
    how_long = "killed" if cell.is_killed else f"{outcome.seconds:.0f} s"
    return f"| {cell.who} | {cell.when} | {cell.how} | {ends}{outcome.code} | {how_long} | {said} |"
