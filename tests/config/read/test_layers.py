"""Defaults < preset with what it extends < --config files < environment < --set; and who set what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.show.explain import explain
from tqppo.config.show.export import origins_json
from tqppo.errors import UsageError


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "presets").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def compiled(*args: object, **kwargs: object) -> Compilation:
    compilation = compile_config(*args, **{"environ": {}, **kwargs})  # type: ignore[arg-type]
    assert compilation.ok, render_text(compilation.diagnostics)
    return compilation


def chain(compilation: Compilation, key: str) -> list[tuple[object, str]]:
    return [(each.value, each.kind) for each in explain(compilation, key).chain]


def test_each_layer_wins_over_the_one_before() -> None:
    write("presets/base.toml", "[actor]\nlr = 1e-1\n")
    write("presets/mine.toml", 'extends = "base"\n[actor]\nlr = 1e-2\n')
    write("a.toml", "[actor]\nlr = 1e-3\n")
    write("b.toml", "[actor]\nlr = 1e-4\n")
    compilation = compile_config("mine", ["a.toml", "b.toml"], ["actor.lr=1e-6"], {"TQPPO__ACTOR__LR": "1e-5"})
    assert compilation.config is not None
    assert compilation.config.actor.lr == 1e-6
    assert chain(compilation, "actor.lr") == [
        (1e-6, "default"),
        (1e-1, "preset"),
        (1e-2, "preset"),
        (1e-3, "config"),
        (1e-4, "config"),
        (1e-5, "environment"),
        (1e-6, "set"),
    ]


def test_origins_name_file_line_and_column() -> None:
    write("run.toml", "# first\n[actor]\nlr = 1e-3\n")
    compilation = compiled(None, ["run.toml"], ["run.seed=3"], environ={"TQPPO__DATA__BATCH_SIZE": "16"})
    places = {key: each[-1].place for key, each in compilation.origins.items()}
    assert places == {
        "actor.lr": "run.toml:3:1",
        "data.batch_size": "TQPPO__DATA__BATCH_SIZE=16",
        "run.seed": "--set run.seed=3",
    }
    written = json.loads(origins_json(compilation))
    assert written["actor.lr"] == {
        "value": 1e-3,
        "origin": "run.toml:3:1",
        "chain": [{"value": 1e-3, "kind": "config", "place": "run.toml:3:1"}],
    }
    assert written["run.name"]["origin"] == "default"


def test_tables_merge_and_lists_are_replaced() -> None:
    write("a.toml", '[rollout]\nstop_token_ids = [1, 2]\nagent = "x:Y"\nagent_args = { a = 1, deep = { x = 1 } }\n')
    write("b.toml", "[rollout]\nstop_token_ids = [3]\nagent_args = { b = 2, deep = { y = 2 } }\n")
    config = compiled(None, ["a.toml", "b.toml"]).draft
    assert config.rollout.stop_token_ids == [3]
    assert config.rollout.agent_args == {"a": 1, "b": 2, "deep": {"x": 1, "y": 2}}


def test_extends_takes_a_list_and_later_ones_win() -> None:
    write("presets/one.toml", "[run]\nseed = 1\nmax_steps = 1\n")
    write("presets/two.toml", "[run]\nseed = 2\n")
    write("run.toml", 'extends = ["one", "two"]\n')
    run = compiled(None, ["run.toml"]).draft.run
    assert (run.seed, run.max_steps) == (2, 1)


def test_extends_finds_files_beside_the_file_that_names_them() -> None:
    write("deep/base.toml", "[run]\nseed = 5\n")
    write("deep/run.toml", 'extends = "./base.toml"\n')
    assert compiled(None, ["deep/run.toml"]).draft.run.seed == 5


def test_extends_finds_a_preset_beside_the_file_before_all_others() -> None:
    write("deep/base-tiny.toml", "[run]\nseed = 6\n")
    write("deep/run.toml", 'extends = "base-tiny"\n')
    assert compiled(None, ["deep/run.toml"]).draft.run.seed == 6


def test_a_preset_may_extend_its_built_in_namesake() -> None:
    write("presets/quickstart.toml", 'extends = "quickstart"\n[run]\nseed = 9\n')
    config = compiled("quickstart").draft
    assert (config.run.seed, config.run.max_steps) == (9, 400)


def test_a_cycle_is_reported_with_its_chain() -> None:
    for name, base in ("a", "b"), ("b", "c"), ("c", "a"):
        write(f"presets/{name}.toml", f'extends = "{base}"\n')
    found = compile_config("a", environ={}).diagnostics
    assert [each.code for each in found] == ["E010"]
    assert "presets/a.toml → presets/b.toml → presets/c.toml → presets/a.toml" in found[0].message


def test_a_file_that_extends_itself_is_a_cycle() -> None:
    write("presets/only.toml", 'extends = "only"\n')
    assert [each.code for each in compile_config("only", environ={}).diagnostics] == ["E010"]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("run.name=plain words", "run.name", "plain words"),
        ("run.name=42", "run.name", "42"),
        ('run.name="42"', "run.name", "42"),
        ("run.name=", "run.name", ""),
        ("run.deterministic=false", "run.deterministic", False),
        ("actor.lr=1e-4", "actor.lr", 1e-4),
        ("actor.lr = 2", "actor.lr", 2),
        ("mode=ppo", "mode", "ppo"),
        ('data.train=["a.jsonl", "b.jsonl"]', "data.train", ["a.jsonl", "b.jsonl"]),
        ("data.train=data/a=b.jsonl", "data.train", "data/a=b.jsonl"),
        ("data.task_args={digits = 5}", "data.task_args", {"digits": 5}),
        ("data.task_args.digits=6", "data.task_args", {"digits": 6}),
        ("rollout={group_size = 4, top_k = 3}", "rollout.group_size", 4),
        ("actor.lr=1e-3\nactor.epochs = 3", None, None),
    ],
)
def test_set_takes_toml_values_and_bare_strings(text: str, key: str | None, value: object) -> None:
    compilation = compile_config(None, [], [text], {})
    if key is None:
        assert not compilation.ok
        return
    found = explain(compilation, key).value
    assert found == value
    assert type(found) is type(value) or isinstance(value, (int, float))


def test_set_reaches_one_teacher() -> None:
    sets = ["mode=distill", "teachers.math.path=t", "teachers.math.replicas=1"]
    assert compiled(None, [], sets).draft.teachers["math"].path == "t"


def test_environment_names_are_case_insensitive_and_reach_every_depth() -> None:
    environ = {
        "TQPPO__MODE": "distill",
        "tqppo__run__max_steps": "7",
        "TQPPO__TEACHERS__MATH__PATH": "folder",
        "TQPPO__TEACHERS__MATH__MATCH": '["sort"]',
        "TQPPO__DATA__TASK_ARGS__DIGITS": "3",
        "TQPPO_PRESET_PATH": "elsewhere",
        "PATH": "/bin",
    }
    config = compiled(environ=environ).draft
    assert (config.mode, config.run.max_steps, config.teachers["math"].match) == ("distill", 7, ["sort"])
    assert config.data.task_args == {"digits": 3}


def test_unknown_environment_names_are_errors_at_the_name() -> None:
    found = compile_config(environ={"TQPPO__RUNN__SEED": "1", "TQPPO__RUN__SEDE": "1"}).diagnostics
    assert {(str(each.span), each.fix) for each in found} == {
        ("environment:TQPPO__RUNN__SEED:8", "did you mean run?"),
        ("environment:TQPPO__RUN__SEDE:8", "did you mean run.seed?"),
    }


def test_extends_is_refused_outside_files() -> None:
    for compilation in (compile_config(None, [], ["extends=x"], {}), compile_config(environ={"TQPPO__EXTENDS": "x"})):
        assert [each.message for each in compilation.diagnostics] == ["extends works only in files"]


def test_a_mistake_in_a_base_that_is_extended_twice_is_reported_once() -> None:
    write("presets/base.toml", "[run]\nsede = 1\n")
    write("presets/a.toml", 'extends = "base"\n')
    write("presets/b.toml", 'extends = "base"\n')
    write("run.toml", 'extends = ["a", "b"]\n')
    assert len(compile_config(None, ["run.toml"], environ={}).diagnostics) == 1


def test_advantage_follows_the_mode_unless_it_is_set() -> None:
    assert compiled(None, [], ["mode=ppo"]).draft.algorithm.advantage == "gae"
    assert compiled(None, [], ["mode=grpo"]).draft.algorithm.advantage == "grpo"
    assert compiled(None, [], ["algorithm.advantage=rloo"]).draft.algorithm.advantage == "rloo"


def test_explaining_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean actor\.lr"):
        explain(compiled(), "actor.lrr")
    with pytest.raises(UsageError, match=r"rollout\.group_size"):
        explain(compiled(), "group_size")


def test_explanation_says_what_it_is_and_who_set_it() -> None:
    write("run.toml", "[actor]\nlr = 1e-3\n")
    text = explain(compiled(None, ["run.toml"]), "actor.lr").text()
    assert text.splitlines()[:3] == ["actor.lr = 0.001", "", "Learning rate."]
    assert text.splitlines()[-2:] == ["  1e-06  ← default", "  0.001  ← run.toml:2:1"]
