"""What Tab offers, without a shell; the shells themselves are in test_shells.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from tqppo.cli import app, completion
from tqppo.config.read.presets import list_presets

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def offered(line: str) -> list[str]:
    return [value for value, _ in completion.answer(typer.main.get_command(app), completion.words_of(line))]


@pytest.mark.parametrize(("shell", "name"), [("bash", "tqppo.bash"), ("zsh", "_tqppo"), ("fish", "tqppo.fish")])
def test_scripts_in_the_tree_are_what_the_command_prints(tqppo: Run, shell: str, name: str) -> None:
    """After a change: `make completions`."""
    assert tqppo("--show-completion", shell).out == (ROOT / "completions" / name).read_text()


def test_shell_is_taken_from_the_environment_when_not_named(tqppo: Run) -> None:
    assert tqppo("--show-completion", environ={"SHELL": "/usr/bin/fish"}).out.startswith("# fish")


def test_install_writes_the_script_where_the_shell_looks(tqppo: Run, tmp_path: Path) -> None:
    answer = tqppo("--install-completion", "fish")
    place = tmp_path / ".config/fish/completions/tqppo.fish"
    assert str(place) in answer.out
    assert place.read_text() == (ROOT / "completions" / "tqppo.fish").read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tqppo", [""]),
        ("tqppo ", [""]),
        ("tqppo tr", ["tr"]),
        ("tqppo train --set 'a b", ["train", "--set", "a b"]),
        ('tqppo train --set "mode=g', ["train", "--set", "mode=g"]),
        ("tqppo train -", ["train", "-"]),
        ("tqppo train # ", ["train", "#", ""]),
    ],
)
def test_line_is_cut_into_words(line: str, words: list[str]) -> None:
    assert (completion.words_of(line) or [""]) == words


def test_commands_and_options() -> None:
    assert "validate-config" in offered("tqppo ")
    assert offered("tqppo template ") == ["check"]
    assert offered("tqppo presets ") == ["list", "show", "diff"]
    assert {"--preset", "--config", "--set", "--dry-run", "--help"} <= set(offered("tqppo train --"))
    assert offered("tqppo nonsense ") == []


def test_every_preset_is_offered_wherever_one_is_expected() -> None:
    names = [preset.name for preset in list_presets()]
    for line in ("train --preset ", "validate-config -p ", "presets show ", "presets diff ", "presets diff x "):
        assert offered(f"tqppo {line}") == names


def test_settings_come_section_by_section() -> None:
    assert {"mode=", "rollout.", "teachers."} <= set(offered("tqppo train --set "))
    assert "rollout.backend=" in offered("tqppo train --set rollout.")
    assert offered("tqppo train --set teachers.math.pa") == ["teachers.math.path="]
    assert offered("tqppo train --set rollout.backendx") == []


def test_values_of_settings() -> None:
    assert offered("tqppo train --set mode=") == ["mode=ppo", "mode=grpo", "mode=distill"]
    assert offered("tqppo train --set run.deterministic=") == ["run.deterministic=true", "run.deterministic=false"]
    assert "storage.backend=ray" in offered("tqppo train --set storage.backend=")
    assert offered("tqppo train --set=mode=g") == ["--set=mode=grpo"]
    assert offered("tqppo train --set actor.lr=") == []


def test_settings_that_name_files_offer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("")
    assert offered("tqppo train --set validation.data=ro") == ["validation.data=rows/"]
    assert offered("tqppo train --set validation.data=rows/") == ["validation.data=rows/a.jsonl"]
    assert offered("tqppo train --set actor.lr=ro") == []


def test_datasets_that_can_be_made_are_offered_and_their_copies_left_to_the_shell() -> None:
    assert offered("tqppo data ") == ["show", "get"]
    assert offered("tqppo data get g") == ["gsm8k"]
    assert offered("tqppo data get gsm8k --from ") == [":files"]


def test_config_files_are_left_to_the_shell() -> None:
    assert offered("tqppo train --config ") == [":files"]
    assert offered("tqppo train --config=a") == [":files"]


def test_runs_without_a_checkpoint_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/begun/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/saved/checkpoints/step_000003").mkdir(parents=True)
    assert offered("tqppo resume ") == ["latest", "saved", "runs/saved/checkpoints/step_000003"]


def test_backends_follow_their_kind() -> None:
    assert offered("tqppo backends check ") == ["rollout", "storage"]
    assert "simple" in offered("tqppo backends check storage ")
    assert "embedded" in offered("tqppo backends check rollout ")
    assert offered("tqppo backends install ") == ["vllm", "sglang"]
