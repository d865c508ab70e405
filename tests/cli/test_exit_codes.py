"""What the process ends with, and that a user's mistake never shows a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def ends(body: str, folder: Path) -> tuple[int, str]:
    """Exit code and messages of the real app with one more command, `fail`, or with a stand-in for training."""
    program = f"import sys, types\nfrom tqppo import errors\nfrom tqppo.cli import app\n{body}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("TqppoError", 1),
        ("DataLost", 1),
        ("EngineError", 1),
        ("UsageError", 2),
        ("ConfigError", 3),
        ("PreflightError", 4),
        ("BackendError", 4),
        ("CheckpointError", 5),
        ("TrainingAborted", 6),
    ],
)
def test_each_error_has_its_code_and_its_message_alone(tmp_path: Path, name: str, code: int) -> None:
    body = f"@app.command('fail')\ndef fail():\n    raise errors.{name}('told to the user')\napp(['fail'])"
    assert ends(body, tmp_path) == (code, "error: told to the user\n")


def test_error_of_a_ray_worker_is_told_without_its_traceback(tmp_path: Path) -> None:
    body = (
        "class Wrapped(errors.CheckpointError):\n    cause = errors.CheckpointError('the file is short')\n"
        "@app.command('fail')\ndef fail():\n    raise Wrapped('Traceback of the worker')\napp(['fail'])"
    )
    assert ends(body, tmp_path) == (5, "error: the file is short\n")


def test_bug_is_one_message_and_a_file(tmp_path: Path) -> None:
    body = "@app.command('fail')\ndef fail():\n    raise ValueError('surprise')\napp(['fail'])"
    code, shown = ends(body, tmp_path)
    assert code == 1
    assert "ValueError: surprise" in shown
    assert "Traceback (most" not in shown
    log = next(tmp_path.glob("tqppo-crash-*.log"))
    assert str(log) in shown
    assert "Traceback (most" in log.read_text()


def test_interrupt_ends_with_130(tmp_path: Path) -> None:
    body = "@app.command('fail')\ndef fail():\n    raise KeyboardInterrupt\napp(['fail'])"
    code, shown = ends(body, tmp_path)
    assert code == 130
    assert "Traceback" not in shown


@pytest.mark.parametrize("code", [0, 6, 130, 143])
def test_train_ends_with_what_the_run_says(tmp_path: Path, code: int) -> None:
    body = (
        f"sys.modules['tqppo.run.start'] = types.SimpleNamespace(train=lambda *a, **k: {code})\n"
        "app(['train', '--preset', 'quickstart', '--no-probe'])"
    )
    assert ends(body, tmp_path) == (code, "")


def test_resume_passes_on_what_was_asked(tmp_path: Path) -> None:
    body = (
        "def resume(*given, **named):\n    print(given, named, file=sys.stderr)\n    return 0\n"
        "sys.modules['tqppo.run.start'] = types.SimpleNamespace(resume=resume)\n"
        "app(['resume', 'mine', '--set', 'logging.project=\"x\"', '--max-steps', '9', '--fork', 'other', '-v'])"
    )
    code, shown = ends(body, tmp_path)
    assert code == 0
    assert shown == (
        "('mine', ['logging.project=\"x\"']) {'max_steps': 9, 'fork': 'other', 'verbosity': 1}\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("trian", 2, "Did you mean 'train'"),
        ("train --presett x", 2, "--preset"),
        ("train", 2, "--preset NAME"),
        ("train --preset quikstart", 3, "quickstart"),
        ("train --preset quickstart --max-steps 0", 2, "--max-steps"),
        ("train --preset quickstart --set actor.lr=fast", 3, "actor.lr"),
        ("validate-config", 2, "--preset NAME"),
        ("validate-config --preset quickstart --format yaml", 2, "github"),
        ("validate-config --config nothing.toml", 3, "nothing.toml"),
        ("validate-config --preset quickstart --set", 2, "--set"),
        ("validate-config --preset quickstart --set noequals", 3, "noequals"),
        ("resume mine --checkpoint other", 2, "name one of them"),
        ("presets show quikstart", 2, "quickstart"),
        ("presets diff quickstart nonsense", 2, "nonsense"),
        ("config explain actor.learning", 2, "actor"),
        ("backends check engine x", 2, "rollout"),
        ("backends check storage smple", 4, "simple"),
        ("backends install embedded", 2, "vllm"),
        ("--show-completion tcsh", 2, "bash, zsh, fish"),
    ],
)
def test_mistake_on_the_command_line(tqppo: Run, command: str, code: int, told: str) -> None:
    answer = tqppo(*command.split())
    assert answer.code == code, answer.err
    assert told in answer.out + answer.err
    assert "Traceback" not in answer.out + answer.err
    assert "bug in tqppo" not in answer.err


@pytest.mark.slow
def test_missing_engine_is_preflight(tqppo: Run, tmp_path: Path) -> None:
    nowhere = {"TQPPO_ENGINES": str(tmp_path / "none")}
    command = ("validate-config", "--preset", "quickstart", "--set", "rollout.backend=vllm", "--probe")
    answer = tqppo(*command, environ=nowhere)
    assert answer.code == 4
    assert "tqppo backends install vllm" in answer.out + answer.err


@pytest.mark.slow
def test_a_run_that_is_not_there_is_refused_by_name(tqppo: Run, tmp_path: Path) -> None:
    answer = tqppo("resume", "nosuch")
    assert (answer.code, "nosuch" in answer.err, "Traceback" in answer.err) == (5, True, False)
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_that_no_code_foresaw_is_named_and_not_called_a_bug(tmp_path: Path) -> None:
    body = (
        "@app.command()\ndef fail():\n"
        f"    raise OSError(28, 'No space left on device', {str(tmp_path / 'x')!r})\n"
        "sys.argv = ['tqppo', 'fail']\napp()"
    )
    code, said = ends(body, tmp_path)
    assert code == 1
    assert said.startswith(f"error: {tmp_path} has no room for more: No space left on device; ")
    assert "bug" not in said
