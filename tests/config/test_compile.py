"""Compiling as a whole: what it imports, and that it is repeatable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tqppo.config.compile import compile_config


def test_an_explained_value_is_compiled_without_torch_ray_or_transformers(tmp_path: Path) -> None:
    code = """
import sys
from tqppo.config.show.keys import all_keys, values_of
all_keys(), values_of("rollout.backend")
assert "pydantic" not in sys.modules and "tree_sitter" not in sys.modules
from tqppo.config.compile import compile_config
from tqppo.config.show.explain import explain, json_schema
from tqppo.config.show.export import origins_json, resolved_toml
from tqppo.config.plan.plan import make_plan
from tqppo.config.read.presets import list_presets
from tqppo.config.show.difference import diff_presets
from tqppo.config.plan.text import plan_text
for preset in list_presets():
    compilation = compile_config(preset.name, [], ["run.seed=1"], {"TQPPO__RUN__MAX_STEPS": "3"})
    assert compilation.ok
    plan_text(make_plan(compilation)), origins_json(compilation), resolved_toml(compilation.draft)
    explain(compilation, "mode")
json_schema(), diff_presets("quickstart", "ppo-tiny")
import tqppo.doctor.probe
heavy = [name for name in ("torch", "ray", "transformers", "numpy", "pyarrow") if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_a_config_compiles_the_same_twice() -> None:
    first, second = (compile_config("grpo-7b", [], ["mode=ppo"], {}) for _ in range(2))
    assert (first.draft, first.diagnostics) == (second.draft, second.diagnostics)


def test_a_warning_leaves_the_config_usable_and_an_error_does_not() -> None:
    warned = compile_config(None, [], ["algorithm.kl_loss=k3"], {})
    assert [each.code for each in warned.diagnostics] == ["W306"]
    assert warned.config is warned.draft
    assert compile_config(None, [], ["actor.lr=fast"], {}).config is None


def test_a_setting_that_a_later_layer_made_ineffective_is_not_in_the_result(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('mode = "ppo"\n[critic]\nlr = 1e-4\n')
    compilation = compile_config(None, [path], ["mode=grpo"], {})
    assert [each.code for each in compilation.diagnostics] == ["W303"]
    assert compilation.draft.critic.lr == 1e-5


def test_names_of_teachers_with_dots_are_refused_and_break_nothing(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    for name in ("a.b", "a.", ".", "", "../../etc"):
        config.write_text(f'mode = "distill"\n[teachers."{name}"]\npath = "student"\n')
        assert "E516" in {each.code for each in compile_config(None, [config], environ={}).diagnostics}
