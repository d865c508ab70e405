from __future__ import annotations

import json

import pytest

from tqppo.cli.schema import schema


def test_the_schema_is_json_that_lists_sections(capsys: pytest.CaptureFixture[str]) -> None:
    schema()
    assert {"rollout", "actor"} <= set(json.loads(capsys.readouterr().out)["properties"])
