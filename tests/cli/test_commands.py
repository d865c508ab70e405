"""Each command as a user meets it: what it prints, as text and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chat_templates import tokenizer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from tqppo.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Run = Callable[..., Any]
GOLDEN = Path(__file__).parent / "golden"
HELP = [
    ("train",),
    ("resume",),
    ("validate-config",),
    ("data",),
    ("schema",),
    ("env",),
    ("presets",),
    ("presets", "list"),
    ("presets", "show"),
    ("presets", "diff"),
    ("config", "explain"),
    ("backends", "list"),
    ("backends", "check"),
    ("backends", "install"),
    ("doctor", "logprobs"),
    ("template", "check"),
    ("agent", "try"),
    ("data", "show"),
    ("data", "get"),
    ("reward", "try"),
    ("eval",),
    ("chat",),
    ("sample",),
    ("export",),
    ("explain",),
    ("runs", "list"),
    ("runs", "show"),
    ("runs", "rm"),
]


def test_help_of_the_top_level_is_as_reviewed(tqppo: Run) -> None:
    assert tqppo("--help", environ={"COLUMNS": "80"}).out == (GOLDEN / "help.txt").read_text()


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_every_command_explains_itself(tqppo: Run, command: tuple[str, ...]) -> None:
    answer = tqppo(*command, "--help")
    assert answer.code == 0
    assert answer.out.startswith(f"Usage: tqppo {' '.join(command)}")
    assert answer.err == ""


def test_help_of_a_group_is_not_cut() -> None:
    """At 80 columns, the width that a terminal has at least."""
    groups = [name for name, command in get_command(app).commands.items() if isinstance(command, TyperGroup)]
    assert len(groups) > 5
    for name in groups:
        lines = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output.splitlines()
        assert not [line for line in lines[1:] if line.endswith("...")], name


def test_version(tqppo: Run) -> None:
    assert tqppo("--version").out.startswith("tqppo 0.")


def test_env_names_versions_and_devices(tqppo: Run) -> None:
    facts = json.loads(tqppo("env", "--json").out)
    assert set(facts) == {"system", "packages", "gpus", "engines"}
    assert facts["packages"]["torch"] == "2.13.0+cpu" or facts["packages"]["torch"].startswith("2.")
    assert "python:" in tqppo("env").out


def test_presets_list_in_both_forms(tqppo: Run, tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "own.toml").write_text('# My own.\nextends = "quickstart"\n')
    listed = {each["name"]: each for each in json.loads(tqppo("presets", "list", "--json").out)}
    assert listed["own"]["summary"] == "My own."
    assert listed["quickstart"]["place"] == "built-in"
    lines = tqppo("presets", "list").out.splitlines()
    assert lines[0].split()[0] == "preset"
    assert any(line.startswith("own ") and line.endswith("My own.") for line in lines)


def test_preset_is_shown_as_its_file_and_resolved(tqppo: Run, tmp_path: Path) -> None:
    plain = tqppo("presets", "show", "quickstart").out
    assert plain.startswith("#")
    resolved = tqppo("presets", "show", "quickstart", "--resolved").out
    values = tomllib.loads(resolved)
    assert {"run", "model", "data", "rollout", "actor"} <= set(values)
    (tmp_path / "again.toml").write_text(resolved)
    assert tqppo("validate-config", "--config", "again.toml").code == 0
    assert json.loads(tqppo("presets", "show", "quickstart", "--json").out)["toml"].strip() == plain.strip()


def test_presets_diff_in_both_forms(tqppo: Run) -> None:
    rows = {each["key"]: each for each in json.loads(tqppo("presets", "diff", "quickstart", "ppo-tiny", "--json").out)}
    assert rows["mode"]["ppo-tiny"] == '"ppo"'
    assert "mode " in tqppo("presets", "diff", "quickstart", "ppo-tiny").out
    assert "do not differ" in tqppo("presets", "diff", "quickstart", "quickstart").out


def test_schema_describes_the_presets(tqppo: Run) -> None:
    schema = json.loads(tqppo("schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    values = tomllib.loads(tqppo("presets", "show", "quickstart", "--resolved").out)
    jsonschema.validate(values, schema)


def test_explain_tells_the_chain(tqppo: Run) -> None:
    command = ("config", "explain", "actor.lr", "--preset", "quickstart", "--set", "actor.lr=0.5")
    told = json.loads(tqppo(*command, "--json", environ={"TQPPO__ACTOR__LR": "0.25"}).out)
    assert told["value"] == 0.5
    assert [link["kind"] for link in told["chain"]][-2:] == ["environment", "set"]
    assert tqppo(*command).out.startswith("actor.lr = 0.5")


def test_explain_lists_a_section(tqppo: Run) -> None:
    assert "actor.lr " in tqppo("config", "explain", "actor").out
    assert "actor.lr" in {each["key"] for each in json.loads(tqppo("config", "explain", "actor", "--json").out)}


def test_validate_prints_the_plan_or_nothing_when_quiet(tqppo: Run) -> None:
    answer = tqppo("validate-config", "--preset", "quickstart")
    assert (answer.code, answer.err) == (0, "")
    assert "embedded" in answer.out
    assert tqppo("validate-config", "--preset", "quickstart", "-q").out == ""
    assert tqppo("-q", "validate-config", "--preset", "quickstart").out == ""


def test_validate_in_json_holds_plan_and_diagnostics(tqppo: Run) -> None:
    good = json.loads(tqppo("validate-config", "--preset", "quickstart", "--json").out)
    assert good["ok"]
    assert good["plan"]
    bad = tqppo("validate-config", "--preset", "quickstart", "--set", "actor.lrr=1", "--format", "json")
    told = json.loads(bad.out)
    assert not told["ok"]
    assert told["plan"] is None
    assert told["diagnostics"][0]["key"] == "actor.lrr"


def test_validate_for_pull_requests(tqppo: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[actor]\nlrr = 1\n")
    shown = tqppo("validate-config", "--preset", "quickstart", "--config", "bad.toml", "--format", "github").out
    assert shown.startswith("::error ")
    assert "file=bad.toml,line=2" in shown


def test_dry_run_prints_the_plan_and_writes_nothing(tqppo: Run, tmp_path: Path) -> None:
    answer = tqppo("train", "--preset", "quickstart", "--name", "mine", "--max-steps", "7", "--dry-run")
    assert answer.code == 0
    assert "mine" in answer.out
    assert not (tmp_path / "runs").exists()


def test_backends_list_says_what_is_missing_and_how_to_get_it(tqppo: Run, tmp_path: Path) -> None:
    nowhere = {"TQPPO_ENGINES": str(tmp_path / "none")}
    listed = {each["name"]: each for each in json.loads(tqppo("backends", "list", "--json", environ=nowhere).out)}
    assert listed["embedded"]["ready"]
    assert listed["simple"]["ready"]
    assert not listed["vllm"]["ready"]
    assert "tqppo backends install vllm" in listed["vllm"]["advice"]
    assert "missing" in tqppo("backends", "list", environ=nowhere).out


@pytest.mark.slow
def test_doctor_finds_the_embedded_engine_exact(tqppo: Run) -> None:
    small = ("--set", "warm_start.steps=0", "--prompts", "4", "--json")
    answer = tqppo("doctor", "logprobs", "--preset", "quickstart", *small)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["max_abs"] < 1e-4
    assert found["correction"] == "none"


@pytest.mark.slow
def test_template_check_names_the_turn_that_breaks_and_ends_with_1(tqppo: Run, tmp_path: Path) -> None:
    tokenizer("strips_all_thoughts").save_pretrained(tmp_path)
    answer = tqppo("template", "check", str(tmp_path))
    assert answer.code == 1
    assert "breaks  turn 1 of 'thoughts, then a question'" in answer.out
    assert "turns of the conversations break a prefix" in answer.out
    found = json.loads(tqppo("template", "check", str(tmp_path), "--json", "--arg", "x=1").out)
    assert {each["kind"] for each in found} == {"breaks", "adds"}
    assert tqppo("template", "check", str(tmp_path), "--arg", "x").code == 2
    sound = tqppo("template", "check", "tiny")
    assert (sound.code, sound.out.splitlines()[-1]) == (0, "tiny: no turns of the conversations break a prefix")
