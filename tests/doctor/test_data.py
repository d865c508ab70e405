"""`data show`: rows as the model sees them, lengths as a histogram."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.data.prompts import DataSpec
from tqppo.doctor.data import histogram, look_at
from tqppo.doctor.tokenizers import load_tokenizer


def _file(folder: Path) -> str:
    rows = [{"question": "x" * (4 + i), "answer": str(i), "level": i} for i in range(10)]
    (folder / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "mine.jsonl")


def test_rows_are_rendered_and_counted(tmp_path: Path) -> None:
    look = look_at(DataSpec(train=_file(tmp_path)), load_tokenizer("tiny"), seed=0, first=8, count=5)
    assert (look.num_rows, look.sources) == (10, {"mine": 10})
    assert [row.where for row in look.rows] == [f"{tmp_path}/mine.jsonl:9", f"{tmp_path}/mine.jsonl:10"]
    assert (look.rows[0].text, look.rows[0].answer) == (f"<|user|>{'x' * 12}<|assistant|>", "8")
    assert look.lengths == list(range(6, 16))


def test_a_histogram_counts_every_length_once() -> None:
    assert histogram([1, 1, 2, 9], bins=3) == [(1, 3, 3), (4, 6, 0), (7, 9, 1)]
    assert histogram([5, 5]) == [(5, 5, 2)]


def test_the_command_prints_rows_lengths_and_what_is_too_long(tmp_path: Path) -> None:
    command = ["data", "show", _file(tmp_path), "--rows", "1", "--set", "data.max_prompt_tokens=14"]
    shown = CliRunner().invoke(app, command).output
    assert "mine.jsonl:1  (6 tokens)\n  prompt   <|user|>xxxx<|assistant|>\n  answer   0\n" in shown
    assert "10 rows; sources: mine (10)\ntokens of all prompts (tiny): 6 to 15, mean 10\n" in shown
    assert "1 prompts are longer than data.max_prompt_tokens = 14" in shown
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["num_rows"] == 10


def test_a_file_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "show", f"{tmp_path}/none.jsonl"])
    assert result.exit_code == 1
    assert f"looked for {tmp_path}/none.jsonl" in result.output
