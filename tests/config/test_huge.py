"""Numbers that no run has: compiling and planning a config ends all the same, in little time and memory."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.plan.plan import make_plan
from tqppo.config.schema import settings

BASES = {
    "grpo-7b": ["rollout.replicas=10000", "cluster.nodes=10000", "cluster.gpus_per_node=128", "actor.ranks=10000"],
    "quickstart": ["checkpoint.interval=999999999999999989", "model.num_heads=7"],
    "distill-7b": ["distillation.nodes=10000", "distillation.gpus_per_node=127"],
}
NUMBERS = sorted(key for key, each in settings().items() if "int" in str(each.field.annotation) and "*" not in key)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", NUMBERS)
def test_a_huge_number_is_refused_or_planned_with(key: str) -> None:
    compilation = compile_config("quickstart", [], [f"{key}={2**63 - 1}"], {})
    render_text(compilation.diagnostics)
    if compilation.ok:
        make_plan(compilation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("preset", BASES)
def test_the_largest_cluster_that_is_allowed_is_planned(preset: str) -> None:
    compilation = compile_config(preset, [], BASES[preset], {})
    assert "is out of range" not in render_text(compilation.diagnostics)


@pytest.mark.timeout(20)
def test_teachers_with_a_huge_number_of_replicas_are_refused() -> None:
    teacher = ["teachers.math.path=t", "teachers.math.replicas=1000000000000", "teachers.math.tensor_parallel=10000000"]
    found = compile_config("distill-tiny", [], [*teacher, "distillation.gpus_per_node=7"], {}).diagnostics
    assert [(each.code, each.key) for each in found if each.code == "E105"] == [
        ("E105", "teachers.math.replicas"),
        ("E105", "teachers.math.tensor_parallel"),
    ]
