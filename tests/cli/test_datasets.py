"""`tqppo data get`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tqppo.cli import app


def test_data_get_prints_the_files_that_it_made(tmp_path: Path) -> None:
    copy = tmp_path / "test.jsonl"
    copy.write_text(json.dumps({"question": "2 + 2?", "answer": "#### 4"}) + "\n")
    arguments = ["data", "get", "gsm8k", "--from", str(copy), "--out", str(tmp_path / "made")]
    said = CliRunner().invoke(app, arguments)
    assert (said.exit_code, said.output) == (0, f"{tmp_path / 'made' / 'test.parquet'}: 1 prompts\n")
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.output) == {str(tmp_path / "made" / "test.parquet"): 1}


def test_an_unknown_dataset_is_a_mistake_in_the_command() -> None:
    said = CliRunner().invoke(app, ["data", "get", "gsm9k"])
    assert said.exit_code == 2
    assert "gsm8k, dapo-math" in said.output
