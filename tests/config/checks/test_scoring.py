"""Teachers can score what the loss needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.engines.capabilities import BUILT_IN

TEACHER = ("mode=distill", "teachers.t.path=t")


def codes(*sets: str) -> list[str]:
    return [each.code for each in compile_config(None, [], [*TEACHER, *sets], {}).diagnostics]


@pytest.mark.parametrize("engine", BUILT_IN)
@pytest.mark.parametrize("loss", facts.WHOLE_VOCABULARY)
def test_whole_vocabularies_need_an_engine_that_gives_hidden_states(engine: str, loss: str) -> None:
    expected = [] if BUILT_IN[engine].score_hidden else ["E517"]
    assert codes(f"teachers.t.backend={engine}", f"distillation.loss={loss}") == expected
    assert codes(f"teachers.t.backend={engine}", f"distillation.loss={loss}_topk") == []


def test_top_k_is_limited_by_each_teachers_engine() -> None:
    sets = ("distillation.loss=forward_kl_topk", "teachers.t.backend=vllm")
    most = BUILT_IN["vllm"].score_top_k
    assert codes(*sets, f"distillation.top_k={most}") == []
    assert codes(*sets, f"distillation.top_k={most + 1}") == ["E506"]


def test_replicas_are_one_for_each_server() -> None:
    sets = ("teachers.t.backend=vllm", 'teachers.t.endpoints=["http://a:1", "http://b:1"]')
    assert codes(*sets) == codes(*sets, "teachers.t.replicas=2") == []
    assert codes(*sets, "teachers.t.replicas=3") == ["E404"]


def test_a_tiny_teacher_is_made_for_a_tiny_student_by_any_engine_that_can_serve_it() -> None:
    made = ("teachers.t.path=task:sort",)
    assert codes(*made) == codes(*made, "teachers.t.backend=sglang") == []
    assert codes(*made, "teachers.t.backend=sglang", "model.num_heads=4") == ["E413"]
    assert codes(*made, "model.num_heads=4") == []
    assert codes(*made, "model.path=Qwen/Qwen2.5-0.5B") == ["E518"]
    assert codes("teachers.t.path=task:reverse", "data.task_args.digits=4") == ["E410"]


def test_a_self_teacher_needs_more_to_read() -> None:
    assert codes("teachers.t.path=student") == ["W519"]
    assert codes("teachers.t.path=student", "teachers.t.prompt={prompt} Reference: {answer}") == []


def test_dropping_what_a_teacher_did_not_score_needs_a_policy_for_incomplete_groups() -> None:
    assert codes("distillation.on_teacher_failure=drop") == ["E521"]
    assert codes("distillation.on_teacher_failure=drop", "rollout.on_incomplete_group=drop") == []


@pytest.mark.parametrize(
    "supported",
    [
        ("rollout.agent=my_agents:Loop", "rollout.max_trajectories=4"),  # several trajectories
        ("actor.ranks=2", "data.batch_size=33", "rollout.group_size=3", "actor.mini_batch_size=10"),  # padding, ranks
        ("model.lora_rank=8", "actor.gradient_checkpointing=true"),
        ("distillation.task_reward=true", "distillation.coef=0.5", "algorithm.filter_groups=true"),
    ],
)
def test_what_distillation_goes_together_with_is_accepted(supported: tuple[str, ...]) -> None:
    assert [code for code in codes(*supported) if code.startswith("E")] == []


def test_the_context_of_a_teacher_covers_its_own_prompt(tmp_path: Path) -> None:
    sets = [*TEACHER, "data.max_prompt_tokens=100", "rollout.max_new_tokens=50"]
    plain = compile_config(None, [], sets, {}).draft
    assert facts.teacher_context_tokens(plain, "t") == 151
    longer = compile_config(None, [], [*sets, "teachers.t.prompt={prompt} A hint: {answer}"], {}).draft
    assert facts.teacher_context_tokens(longer, "t") == 151 + 2 + 150
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 264, "max_position_embeddings": 200}))
    small = [*sets, "teachers.t.prompt={prompt} A hint: {answer}", f"teachers.t.path={tmp_path}"]
    assert facts.teacher_context_tokens(compile_config(None, [], small, {}).draft, "t") == 200
