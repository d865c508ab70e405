"""Shipped presets compile, open with what they need, and resolve to TOML that says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.plan.budget import make_budget
from tqppo.config.read.presets import find_preset, list_presets
from tqppo.config.show.difference import diff_presets
from tqppo.config.show.export import flat_toml, resolved_toml
from tqppo.data.recipes import RECIPES
from tqppo.engines.environments import ENVIRONMENTS

FOLDER = Path(__file__).parents[3] / "presets"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
RUNS = [name for name in NAMES if not name.startswith("base-")]
ON_VLLM = [name for name in RUNS if compile_config(name, environ={}).draft.rollout.backend == "vllm"]


def test_the_promised_presets_are_there() -> None:
    promised = {"quickstart", "ppo-tiny", "distill-tiny", "grpo-agent-tiny", "grpo-7b", "ppo-7b", "distill-7b"}
    promised |= {"grpo-tools-7b", "grpo-0.5b", "dapo-math-7b", "grpo-32b"}
    assert promised <= set(RUNS)


@pytest.mark.parametrize("name", NAMES)
def test_preset_compiles_without_a_word(name: str) -> None:
    compilation = compile_config(name, environ={})
    assert compilation.diagnostics == [], render_text(compilation.diagnostics)


@pytest.mark.parametrize("name", RUNS)
def test_preset_opens_with_what_it_shows_what_it_needs_and_the_command(name: str) -> None:
    header = re.sub("^# ?", "", find_preset(name, {}).read_text().partition("\n\n")[0], flags=re.MULTILINE)
    assert re.search(r"^Shows: .+^Needs: .+^Run: ", header, re.MULTILINE | re.DOTALL)
    assert f"tqppo train --preset {name}" in header


@pytest.mark.parametrize("name", NAMES)
def test_resolved_toml_reproduces_the_config(name: str, tmp_path: Path) -> None:
    original = compile_config(name, [], ["run.seed=7"], {})
    (tmp_path / "resolved.toml").write_text(resolved_toml(original.draft), encoding="utf-8")
    again = compile_config(None, [tmp_path / "resolved.toml"], environ={})
    assert again.ok, render_text(again.diagnostics)
    assert again.draft == original.draft


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["mode=grpo", "mode=ppo", "model.path=somewhere/else", "data.train=mine.jsonl"])
def test_a_changed_preset_still_resolves_to_one_consistent_file(name: str, change: str, tmp_path: Path) -> None:
    changed = compile_config(name, [], [change], {})
    if not changed.ok:  # PPO refuses some settings of GRPO, with a message
        return
    (tmp_path / "resolved.toml").write_text(resolved_toml(changed.draft), encoding="utf-8")
    again = compile_config(None, [tmp_path / "resolved.toml"], environ={})
    assert again.ok, render_text(again.diagnostics)
    assert again.draft == changed.draft


def test_resolved_toml_survives_strings_that_need_care(tmp_path: Path) -> None:
    awkward = 'a "quoted" \\ path\n\tand é 漢 🙂'
    original = compile_config(None, [], [f"data.system_prompt={awkward}", "data.task_args={digits = 5}"], {})
    (tmp_path / "r.toml").write_text(resolved_toml(original.draft), encoding="utf-8")
    assert compile_config(None, [tmp_path / "r.toml"], environ={}).draft == original.draft


def test_presets_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / "presets", tmp_path / "shared", tmp_path / "config" / "tqppo" / "presets"]
    environ = {"TQPPO_PRESET_PATH": f"{tmp_path / 'none'}:{places[1]}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert find_preset("quickstart", environ) == FOLDER / "quickstart.toml"
    for place in reversed(places):
        place.mkdir(parents=True)
        (place / "quickstart.toml").write_text("# Mine.\n")
        found = find_preset("quickstart", environ)
        assert found is not None
        assert found.resolve() == place / "quickstart.toml"
    listed = {preset.name: (preset.place, preset.summary) for preset in list_presets(environ)}
    assert listed["quickstart"] == ("project", "Mine.")
    assert listed["grpo-7b"][0] == "built-in"


def test_the_home_folder_holds_presets_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".config" / "tqppo" / "presets").mkdir(parents=True)
    (tmp_path / ".config" / "tqppo" / "presets" / "own.toml").write_text("")
    assert find_preset("own", {"HOME": str(tmp_path)}) is not None


def test_difference_of_two_presets_names_keys_and_values() -> None:
    difference = {key: (a, b) for key, a, b in diff_presets("quickstart", "ppo-tiny", {})}
    assert difference["mode"] == ('"grpo"', '"ppo"')
    assert "model.path" not in difference
    assert diff_presets("grpo-7b", "grpo-7b", {}) == []
    added = {key: (a, b) for key, a, b in diff_presets("grpo-7b", "distill-7b", {})}
    assert added["teachers.math.replicas"] == ("", "2")


def test_flat_values_are_toml() -> None:
    flat = flat_toml(compile_config("distill-7b", environ={}).draft)
    assert flat["teachers.math.match"] == '["openai/gsm8k"]'
    assert flat["rollout.endpoints"] == "[]"
    assert flat["run.deterministic"] == "false"


@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("tiny") and name != "quickstart"])
def test_a_preset_for_gpus_says_their_size_and_its_plan_fits(name: str) -> None:
    budget = make_budget(compile_config(name, environ={}).draft)
    assert budget.gpu_bytes
    assert budget.stages
    assert not budget.overfull
    assert not budget.unknown


@pytest.mark.parametrize("name", ON_VLLM)
def test_a_preset_with_an_engine_of_its_own_says_how_to_install_it_for_gpus(name: str) -> None:
    text = find_preset(name, {}).read_text()
    assert ENVIRONMENTS["vllm"].gpu.replace("ENV", "~/vllm") in re.sub(r"\n# +", " ", text)
    assert "rollout.python=" in text
    assert "backends install vllm" not in text


@pytest.mark.parametrize("name", [name for name in RUNS if "data/" in find_preset(name, {}).read_text()])
def test_the_files_of_a_preset_are_those_that_a_command_makes(name: str) -> None:
    config, text = compile_config(name, environ={}).draft, find_preset(name, {}).read_text()
    for source in [*facts.data_sources(config), str(config.validation.data)]:
        folder = source.rpartition("/")[0]
        (command,) = [f"tqppo data get {key}" for key, recipe in RECIPES.items() if recipe.folder == folder]
        assert command in text, source


def test_the_page_about_presets_has_a_table_for_each_that_follows_a_recipe() -> None:
    page = (FOLDER.parent / "docs" / "presets.md").read_text()
    following = [name for name in RUNS if "docs/presets.md" in find_preset(name, {}).read_text()]
    assert {"grpo-0.5b", "grpo-7b", "ppo-7b", "dapo-math-7b", "distill-7b", "grpo-32b"} <= set(following)
    assert not [name for name in following if f"## `{name}`" not in page]
