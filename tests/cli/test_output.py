"""Everything that commands print goes through functions that let nothing reach the terminal as a command."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo import cli
from tqppo.cli import app
from tqppo.cli.output import emit_json, say, table, tick

COMMANDS = Path(cli.__file__).parent
OWN_COLOURS = {"output.py", "compiling.py", "completion.py"}  # diagnostics are made printable where they are rendered
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\ud800"


def test_commands_print_through_one_function() -> None:
    trees = {path.name: ast.parse(path.read_text()) for path in COMMANDS.glob("*.py") if path.name not in OWN_COLOURS}
    calls = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    raw = [f"{name}:{node.lineno}" for name, node in calls if ast.unparse(node) in ("typer.echo", "typer.secho")]
    assert not raw


def test_text_tables_and_json_hold_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    tick(HOSTILE)
    table([HOSTILE], [[HOSTILE]])
    emit_json({HOSTILE: HOSTILE})
    out = capsys.readouterr().out
    assert not set(out) & set(HOSTILE) & {"\x1b", "\x07", "\x9b", "\ud800"}
    assert json.loads(out[out.index("{") :]) == {HOSTILE: HOSTILE}


@pytest.mark.parametrize(
    "text",
    [
        '["\\u001b[2J"]\na = 1\n',
        '[run]\n"\\u001b[2J" = 1\n',
        '[run]\nname = "\\u001b[2J"\n',
        'extends = "\\u001b[2J"\n',
        'mode = "\\u001b[2J"\n',
        '[teachers."\\u001b[2J"]\npath = 1\n',
        '[rollout]\nbackend = "\\u001b[2J"\nagent = "\\u009b31m"\n',
        '[data]\ntrain = "task:\\u001b[2J"\n',
        "[run]\nname = '\x1b[2J'\n",
        "\x1b[2J\n",
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_hostile_keys_and_values_are_shown_as_text(tmp_path: Path, text: str, form: str) -> None:
    path = tmp_path / "\x1b[2J.toml"
    path.write_text(text)
    answer = CliRunner().invoke(app, ["validate-config", "--config", str(path), "--format", form])
    assert answer.exit_code == 3, answer.output
    assert isinstance(answer.exception, SystemExit)
    assert not set(answer.output) & {"\x1b", "\x9b", "\x07"}


def test_hostile_rows_are_shown_as_text(tmp_path: Path) -> None:
    row = {"prompt": f"2+2? {HOSTILE[:-1]}", "answer": HOSTILE[:-1], "data_source": HOSTILE[:-1], HOSTILE[:-1]: 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    for more in ([], ["--json"]):
        answer = CliRunner().invoke(app, ["data", "show", str(tmp_path / "a.jsonl"), *more])
        assert answer.exit_code == 0, answer.output
        assert "owned" in answer.output
        assert not set(answer.output) & {"\x1b", "\x9b", "\x07"}
