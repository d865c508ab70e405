"""The three renderings of a problem, and the keys for completion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic, Span, render_github, render_json, render_text, summary
from tqppo.config.read.nearest import distance, nearest
from tqppo.config.schema import settings
from tqppo.config.show.explain import json_schema
from tqppo.config.show.keys import all_keys, values_of

PROBLEM = Diagnostic("error", "E101", "unknown key a,b: 50%", Span("x.toml", 3, 5, 2, "漢 = ab"), "a", fix="write\nit")


def test_caret_stands_under_the_token_behind_wide_characters() -> None:
    lines = render_text([PROBLEM]).splitlines()
    assert lines[3] == "3 | 漢 = ab"
    assert lines[4] == "  |      ^^"  # one more cell than characters before it


def test_colour_is_only_paint() -> None:
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", render_text([PROBLEM], color=True)) == render_text([PROBLEM])


def test_json_has_every_part() -> None:
    (each,) = json.loads(render_json([PROBLEM]))
    assert (each["file"], each["line"], each["column"], each["end_column"]) == ("x.toml", 3, 5, 7)
    assert set(each) >= {"severity", "code", "message", "key", "found", "allowed", "fix", "source", "notes"}


def test_github_commands_escape_what_they_must() -> None:
    line = render_github([PROBLEM])
    place = "file=x.toml,line=3,col=5,endColumn=7"
    assert line == f"::error title=tqppo E101,{place}::unknown key a,b: 50%25%0Afix: write%0Ait\n"


def test_summary_counts_errors_and_warnings() -> None:
    warning = Diagnostic("warning", "W008", "empty")
    assert summary([PROBLEM, PROBLEM, warning]) == "1 error, 1 warning"
    assert summary([]) == "no problems"


def test_completion_reads_the_same_keys_as_pydantic() -> None:
    keys = {key.name: key for key in all_keys()}
    assert list(keys) == list(settings())
    for name, slot in settings().items():
        assert keys[name].doc == slot.doc
        choices = ["true", "false"] if slot.choices == (True, False) else [str(each) for each in slot.choices]
        assert [value.strip('[]"') for value in keys[name].values] == choices


def test_completion_offers_values_after_the_equals_sign() -> None:
    assert values_of("mode") == ("ppo", "grpo", "distill")
    assert values_of("run.deterministic") == ("true", "false")
    assert set(values_of("rollout.backend")) >= {"embedded", "vllm", "sglang"}
    assert values_of("actor.lr") == values_of("nonsense") == ()


def test_every_key_is_documented() -> None:
    assert [key for key, slot in settings().items() if len(slot.doc) < 10] == []


def test_schema_documents_every_key_and_forbids_others() -> None:
    schema = json_schema()
    actor = schema["$defs"]["ActorSection"]
    assert actor["additionalProperties"] is False
    assert actor["properties"]["lr"]["description"] == "Learning rate."
    assert "extends" in schema["properties"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("lr", "lr", 0), ("lr", "rl", 1), ("epoch", "epochs", 1), ("abc", "", 3)]
)
def test_distance_counts_edits(a: str, b: str, edits: int) -> None:
    assert distance(a, b) == edits


def test_nearest_ignores_case_and_dashes() -> None:
    assert nearest("Mini-Batch-Size", ["mini_batch_size", "epochs"]) == ["mini_batch_size"]
    assert nearest("zzz", ["lr", "epochs"]) == []


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
