from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.cli.resume import resume
from tqppo.errors import UsageError


def test_a_run_is_named_once() -> None:
    context = typer.Context(typer.main.get_command(app))
    with pytest.raises(UsageError, match="name one of them"):
        resume(context, "mine", "yours")


def test_a_run_that_does_not_exist_ends_with_a_message() -> None:
    answer = CliRunner().invoke(app, ["resume", "no-such-run"])
    assert answer.exit_code == 5
    assert "no-such-run" in answer.output
