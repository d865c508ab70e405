"""What a command loads: the light ones must never pull in torch, ray or transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "ray", "transformers"}
SLOW = {"pydantic", "tree_sitter", "rich", "tomli_w"}


def loaded(arguments: list[str], folder: Path, line: str = "", *, code: int = 0) -> set[str]:
    """Top-level modules that are there after the command."""
    program = (
        "import sys, json\nfrom tqppo.cli import app\n"
        f"try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert (end.code or 0) == {code}, end.code\n"
        "print(json.dumps([name for name in sys.modules if '.' not in name]), file=sys.stderr)"
    )
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    environ |= {"_TQPPO_COMPLETE": "bash", "_TQPPO_LINE": line} if line else {}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "--show-completion bash",
        "env",
        "schema",
        "presets list",
        "presets show quickstart --resolved",
        "presets diff quickstart ppo-tiny",
        "config explain actor.lr --preset quickstart",
        "backends list",
        "validate-config --preset grpo-7b",
        "validate-config --preset quickstart --explain --json",
        "train --preset quickstart --dry-run",
    ],
)
def test_light_command_loads_nothing_heavy(tmp_path: Path, command: str) -> None:
    assert not HEAVY & loaded(command.split(), tmp_path)


@pytest.mark.parametrize(
    "command", ["data show rows.jsonl", "reward try gsm8k --data rows.jsonl", "runs list", "config explain"]
)
def test_looking_at_data_and_rewards_loads_no_torch(tmp_path: Path, command: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert not {"torch", "ray"} & loaded(command.split(), tmp_path)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("eval none", 2),
        ("chat none", 2),
        ("sample none --prompt 1", 2),
        ("export none --to hf", 2),
        ("resume none", 5),
        ("train --preset quickstart --name taken", 2),
    ],
)
def test_a_wrong_name_is_found_before_torch_is_loaded(tmp_path: Path, command: str, code: int) -> None:
    run = tmp_path / "runs" / "taken"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    assert not HEAVY & loaded(command.split(), tmp_path, code=code)


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_help_loads_nothing_slow(tmp_path: Path, command: str) -> None:
    assert not (HEAVY | SLOW) & loaded(command.split(), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "tqppo ",
        "tqppo train --",
        "tqppo train --preset ",
        "tqppo train --set rollout.",
        "tqppo train --set rollout.backend=",
        "tqppo train --set mode=",
        "tqppo resume ",
        "tqppo backends check storage ",
    ],
)
def test_tab_loads_nothing_slow(tmp_path: Path, line: str) -> None:
    assert not (HEAVY | SLOW) & loaded([], tmp_path, line)
