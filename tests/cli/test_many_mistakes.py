"""More than sixty mistakes through the command line: exit code, place, fix, no traceback, time to the message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config.test_golden import CASES, compiled
from tqppo.cli import app

MOST_SECONDS = 3.0  # of this process: others may have the cores
# They are about a file as a whole, which the message names: there is no line to show.
WITHOUT_PLACE = {"unknown-preset", "missing-file", "directory", "ten-megabytes"}


def test_there_are_more_than_sixty() -> None:
    assert len(CASES) > 60


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_ends_with_its_place_and_a_fix(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    problems = compiled(case, tmp_path).diagnostics
    files = ("run.toml",) if case.config is None else case.config
    options = [word for file in files if case.run or case.config for word in ("--config", file)]
    options += ["--preset", case.preset] if case.preset else []
    options = options or ["--preset", "quickstart"]
    options += [word for each in case.sets for word in ("--set", each)]
    begun = time.process_time()
    found = CliRunner().invoke(app, ["validate-config", *options], env=dict(case.environ))
    assert time.process_time() - begun < MOST_SECONDS
    is_error = any(each.severity == "error" for each in problems)
    assert found.exit_code == (3 if is_error else 0), found.output
    assert "Traceback" not in found.output
    assert name in WITHOUT_PLACE or "--> " in found.output or "(default)" in found.output
    assert "= fix: " in found.output
