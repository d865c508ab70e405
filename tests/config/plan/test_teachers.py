"""The plan of distillation: its teachers, and the bytes of their columns."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.plan.plan import Plan, make_plan
from tqppo.config.plan.teachers import teacher_bytes
from tqppo.config.plan.text import plan_text


def plan_of(preset: str, *sets: str) -> Plan:
    compilation = compile_config(preset, [], sets, {})
    assert compilation.ok, compilation.diagnostics
    return make_plan(compilation)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("k3", {"teacher_logprobs": 4}),
        ("forward_kl_topk", {"teacher_ids": 32, "teacher_logprobs": 32}),
        ("reverse_kl", {"teacher_hidden": 4 * 64}),
    ],
)
def test_bytes_per_token_are_those_of_the_columns(loss: str, expected: dict[str, int]) -> None:
    sets = ["mode=distill", "teachers.t.path=student", f"distillation.loss={loss}"]
    top_k = ["distillation.top_k=8"] if loss.endswith("_topk") else []
    assert teacher_bytes(compile_config(None, [], [*sets, *top_k], {}).draft) == expected


def test_the_plan_shows_each_teacher_with_its_devices_and_rows() -> None:
    plan = plan_of("distill-7b")
    assert plan.distillation is not None
    math, code = plan.distillation.teachers
    assert (math.replicas, math.devices, math.scores) == (2, "4 GPUs of the pool", ("openai/gsm8k",))
    assert (code.engine, code.context_tokens) == ("vllm", plan.tokens + 1)
    text = plan_text(plan)
    assert "teacher_ids 256 + teacher_logprobs 256 = 512 bytes per token" in text
    assert "data_source openai/gsm8k" in text
    assert plan.as_dict()["distillation"]["teachers"][0]["model"] == "Qwen/Qwen2.5-14B-Instruct"


def test_hidden_states_fill_the_storage_by_the_width_of_the_widest_teacher() -> None:
    sets = ["teachers.math.backend=embedded", "teachers.math.tensor_parallel=1", "teachers.math.replicas=4"]
    sets += ["teachers.code.backend=embedded", "teachers.code.tensor_parallel=1", "teachers.code.replicas=4"]
    plan = plan_of("distill-7b", *sets, "distillation.loss=forward_kl")
    assert plan.distillation is not None
    assert plan.distillation.bytes_per_token == {"teacher_hidden": 2 * 5120}
    storage = next(role for role in plan.roles if role.name == "storage")
    assert storage.memory[0].num_bytes > plan.rows * plan.tokens * 2 * 5120
    actor = next(role for role in plan.roles if role.name == "actor")
    assert actor.memory[-1].num_bytes == 2 * (152_064 * 5120 + 152_064 * 5120)  # the teachers' output layers


def test_a_privileged_prompt_and_the_whole_data_are_shown() -> None:
    text = plan_text(plan_of("distill-tiny", "teachers.sorter.prompt={prompt} is {answer}"))
    assert "task:sort, which reads '{prompt} is {answer}'" in text
    one = compile_config(None, [], ["mode=distill", "teachers.t.path=t"], {})
    assert "every row" in plan_text(make_plan(one))


def test_other_modes_have_no_teachers_in_their_plan() -> None:
    assert plan_of("quickstart").distillation is None
