"""A sample of what `make fuzz` runs, and that the fuzzer itself finds what it looks for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fuzz.__main__ import TARGETS
from fuzz.mutations import changed, damaged
from fuzz.run import Findings, run

from tqppo.errors import DataError

SAMPLED = {"configs": 50, "models": 40}
SEED = 1


@pytest.mark.parametrize("name", TARGETS)
def test_files_from_outside_are_read_or_refused(name: str, tmp_path: Path) -> None:
    found = run(TARGETS[name](tmp_path), SEED, range(SAMPLED.get(name, 200)))
    assert found.cases == SAMPLED.get(name, 200)
    assert not found.problems, "\n".join(found.problems)


# Cases of seed 0 that once gave a traceback, or did not end
FOUND = [("parquet", 403), ("snapshots", 8886), ("models", 598), ("models", 3182)]


@pytest.mark.parametrize(("name", "case"), FOUND)
def test_what_was_found_once_is_not_found_again(name: str, case: int, tmp_path: Path) -> None:
    found = run(TARGETS[name](tmp_path), 0, range(case, case + 1))
    assert not found.problems, "\n".join(found.problems)


class Reader:
    """Reads numbers: refuses 1, fails with a traceback on 2, and never ends with 3."""

    name = "numbers"

    def __init__(self) -> None:
        self.number, self.is_closed = -1, False

    def make(self, rng: random.Random) -> None:
        self.number += 1

    def read(self) -> None:
        if self.number == 1:
            raise DataError("not 1")
        if self.number == 2:
            raise KeyError("two")
        while self.number == 3:
            pass

    def close(self) -> None:
        self.is_closed = True


def test_a_traceback_and_a_hang_are_found_and_a_refusal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.run.MAX_CASE_S", 0.2)
    reader = Reader()
    found: Findings = run(reader, 0, range(5))
    assert (found.cases, found.refused, reader.is_closed) == (5, 1, True)
    assert [(what.split()[0], number) for what, (number, _) in found.problems.items()] == [("KeyError", 2), ("Hang", 3)]


def test_a_case_is_made_of_its_seed_alone() -> None:
    value = {"a": [1, {"b": "text"}], "c": None}
    made = [(damaged(random.Random("7"), b"some bytes"), json.dumps(changed(random.Random("7"), value))) for _ in "12"]
    assert made[0] == made[1]
    assert value == {"a": [1, {"b": "text"}], "c": None}
