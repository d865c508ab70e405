"""Mistakes on the command line, each with the exit code and what to type instead."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.cli.mistakes import as_settings, setting_for
from tqppo.errors import UsageError


def said(*arguments: str, code: int = 2, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), env=env)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_an_option_that_is_a_setting_says_how_settings_are_written() -> None:
    text = said("train", "--preset", "quickstart", "--lr", "1e-3")
    assert text.startswith("error: no such option: --lr\n  fix: settings are written --set actor.lr=1e-3 or --set ")
    assert "help: " in text


def test_other_errors_of_the_parser_look_like_ours() -> None:
    assert said("trian").startswith("error: no such command 'trian'. Did you mean 'train'?")
    assert said("train", "--max-steps", "many").startswith("error: invalid value for '--max-steps'")
    assert said("sample", "mine").startswith("error: missing option '--prompt'")


def test_data_without_its_verb_says_which_one_is_meant() -> None:
    assert "fix: write tqppo data get gsm8k\n" in said("data", "gsm8k")
    assert "fix: write tqppo data show rows.jsonl\n" in said("data", "rows.jsonl")
    assert "fix: " not in said("data", "nonsense")
    assert "fix: " not in said("gsm8k")


def test_a_preset_without_its_option_is_recognised() -> None:
    assert "quickstart is a preset: write --preset quickstart" in said("train", "quickstart")
    assert "mine.toml is a file: write --config mine.toml" in said("validate-config", "mine.toml")
    assert "unexpected argument 'fast'" in said("train", "fast")


def test_bare_settings_count_as_set() -> None:
    assert "learning rate" not in said("validate-config", "--preset", "quickstart", "actor.lr=1e-4", code=0)
    assert "error[E101]" in said("validate-config", "--preset", "quickstart", "actor.lrr=1e-4", code=3)
    assert as_settings(["a.b=1"], []) == ["a.b=1"]
    with pytest.raises(UsageError, match="unexpected argument"):
        as_settings(["a"], [])


def test_unset_gives_the_default_back() -> None:
    text = said("validate-config", "--preset", "quickstart", "--unset", "run.max_step", code=3)
    assert "unknown key run.max_step" in text
    assert "did you mean run.max_steps?" in text


def test_a_variable_with_one_underscore_is_reported() -> None:
    text = said("validate-config", "--preset", "quickstart", code=0, env={"TQPPO_ACTOR_LR": "1e-3"})
    assert "warning[W013]: the variable TQPPO_ACTOR_LR sets nothing" in text
    assert "fix: write TQPPO__ACTOR__LR" in text


def test_a_name_that_leaves_the_folder_is_refused() -> None:
    text = said("train", "--preset", "quickstart", "--name", "../x y", code=3)
    assert "error[E435]" in text
    assert 'run.name = "x-y"' in text


def test_an_option_of_no_setting_has_no_fix() -> None:
    assert setting_for("--nothing-like-it", []) == ""
    assert setting_for("--group-size", ["--group-size=4"]) == "settings are written --set rollout.group_size=4"


def test_all_settings_are_listed_without_a_key_and_a_mistake_is_reported() -> None:
    text = said("config", "explain", code=0)
    assert "actor.lr" in text
    assert "validation.interval" in text
    assert "error[E105]" in said("config", "explain", "actor", "--set", "actor.lr=inf", code=3)
    assert said("config", "explain", "lr").count("warm_start.lr") == 1


def test_a_session_is_tried_with_a_preset_in_either_spelling() -> None:
    assert "name one of them" in said("agent", "try", "quickstart", "--preset", "quickstart")
    assert "did you mean" in said("agent", "try", "--preset", "quickstrat", code=3)
