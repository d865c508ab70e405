from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.cli.validate import FORMATS


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_accepts_a_good_config(form: str) -> None:
    answer = CliRunner().invoke(app, ["validate-config", "--preset", "quickstart", "--format", form])
    assert answer.exit_code == 0, answer.output
    if form == "json":
        assert json.loads(answer.stdout)["ok"] is True


def test_an_unknown_format_is_a_usage_error() -> None:
    answer = CliRunner().invoke(app, ["validate-config", "--preset", "quickstart", "--format", "xml"])
    assert answer.exit_code == 2
    assert "there is text, json, github" in answer.output
