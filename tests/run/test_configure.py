"""From settings to specs: each process gets its own values, and nothing else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tqppo.algorithms.advantages import EstimateOptions
from tqppo.algorithms.losses import PolicyOptions
from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.run import configure
from tqppo.run.configure import RunPaths

PATHS = RunPaths("the-model", "the-tokenizer", Path("logs"), "published")


def config_of(*overrides: str, preset: str | None = None) -> Config:
    compilation = compile_config(preset, [], list(overrides), {})
    assert compilation.config is not None, compilation.diagnostics
    return compilation.config


def test_options_take_the_settings_of_the_same_names() -> None:
    algorithm = config_of("algorithm.clip_high=0.28", "algorithm.single_session=raw").algorithm
    assert configure.options_of(PolicyOptions, algorithm).clip_high == 0.28
    assert configure.options_of(EstimateOptions, algorithm).single_session == "raw"
    with_critic = config_of("mode=ppo", "algorithm.gamma=0.9").algorithm
    assert configure.options_of(EstimateOptions, with_critic).gamma == 0.9


def test_the_actor_learns_as_the_config_says() -> None:
    config = config_of(
        *("actor.lr=0.01", "actor.epochs=3", "run.max_steps=7", "model.lora_rank=4", "actor.micro_batch_tokens=999"),
        *("algorithm.kl_loss=k2", "algorithm.kl_loss_coef=0.5", "algorithm.aggregate=session-mean"),
    )
    spec = configure.actor_spec(config, PATHS)
    assert (spec.optimizer.lr, spec.optimizer.epochs, spec.optimizer.total_steps) == (0.01, 3, 7)
    assert (spec.model.path, spec.model.lora_rank, spec.micro_batch_tokens) == ("the-model", 4, 999)
    assert (spec.policy_loss.kl, spec.policy_loss.kl_coef, spec.policy_loss.aggregate) == ("k2", 0.5, "session-mean")
    assert (spec.features.kl_in_loss, spec.features.has_session_weights) == (True, True)
    assert spec.publish_dir == "published"


def test_only_the_actor_has_an_adapter_and_models_may_have_paths_of_their_own() -> None:
    config = config_of(
        *("mode=ppo", "model.lora_rank=4", "critic.path=small", "critic.value_clip=0.1", "reward_model.path=judge"),
        *("algorithm.kl_loss=k2", "algorithm.kl_loss_coef=0.5", "reference.path=base"),
    )
    critic, reference = configure.critic_spec(config, PATHS), configure.reference_spec(config, PATHS)
    assert (critic.model.path, critic.model.lora_rank, critic.value_loss.clip) == ("small", 0, 0.1)
    assert (reference.model.path, reference.model.lora_rank) == ("base", 0)
    assert configure.reward_model_spec(config).model.path == "judge"


def test_the_constant_divisor_is_the_longest_response_unless_it_is_set() -> None:
    divided = "algorithm.aggregate=seq-mean-token-sum-norm"
    assert configure.actor_spec(config_of(divided, "rollout.max_new_tokens=77"), PATHS).policy_loss.horizon == 77
    assert configure.actor_spec(config_of(divided, "algorithm.horizon=9"), PATHS).policy_loss.horizon == 9


def test_the_engine_gets_the_sum_of_prompt_and_response() -> None:
    config = config_of("data.max_prompt_tokens=100", "rollout.max_new_tokens=28", "run.seed=5")
    spec = configure.rollout_spec(config, PATHS, (2,))
    assert (spec.engine.max_context_tokens, spec.engine.seed, spec.engine.eos_token_ids) == (128, 5, (2,))
    assert (spec.tokenizer, spec.backend, spec.agent) == ("the-tokenizer", "embedded", "single_turn")
    assert configure.sampling(config, temperature=0.5).temperature == 0.5


def test_files_of_agents_and_tools_have_their_full_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tools = 'rollout.agent_args.tools=["t.py:add", "package.tools:add"]'
    (tmp_path / "t.py").touch()
    spec = configure.rollout_spec(config_of("rollout.agent=loop.py:Loop", tools), PATHS, (2,))
    assert spec.agent == f"{tmp_path}/loop.py:Loop"
    assert spec.agent_args["tools"] == [f"{tmp_path}/t.py:add", "package.tools:add"]


def test_the_estimator_gets_the_algorithm_and_the_limits() -> None:
    config = config_of("algorithm.correction=icepop", "algorithm.correction_cap=5.0", "rollout.max_new_tokens=28")
    spec = configure.estimator_spec(config, PATHS)
    assert (spec.advantage, spec.correction, spec.correction_cap) == ("grpo", "icepop", 5.0)
    assert spec.max_response_tokens == 28
    assert spec.features.has_correction_weights


TAUGHT = (
    *("mode=distill", 'data.train=["task:sort", "task:reverse"]', "teachers.a.path=big", 'teachers.a.match=["sort"]'),
    *(
        "teachers.b.path=student",
        'teachers.b.match=["reverse"]',
        'teachers.b.prompt="{prompt} {answer}"',
        "teachers.b.replicas=3",
    ),
)
TAUGHT_PATHS = replace(PATHS, teachers={"a": "big", "b": "the-model"}, scores=Path("/run/teachers"))


def test_a_teacher_gets_its_own_section_and_no_other() -> None:
    more = ("distillation.loss=forward_kl_topk", "distillation.top_k=7", "distillation.cache_gb=0.5")
    more += ("distillation.timeout_s=9", "distillation.retries=1", "teachers.a.max_restarts=5", "run.seed=3")
    config = config_of(*TAUGHT, *more, "data.max_prompt_tokens=100", "rollout.max_new_tokens=28")
    a, b = configure.teacher_setups(config, TAUGHT_PATHS, vocabulary=99)
    assert (a.spec.name, a.spec.engine.model, a.spec.top_k, a.spec.hidden, a.spec.vocabulary) == (
        "a",
        "big",
        7,
        False,
        99,
    )
    assert (a.spec.cache_path, a.spec.cache_bytes) == ("/run/teachers/a.sqlite", 2**29)
    assert (a.timeout_s, a.retries, a.spec.engine.request_timeout_s, a.spec.engine.max_restarts) == (9, 1, 9, 5)
    assert (a.match, a.prompt, a.is_deterministic, a.spec.engine.max_context_tokens) == (("sort",), "", True, 129)
    assert (b.spec.engine.model, b.prompt) == ("the-model", "{prompt} {answer}")
    assert [spec.engine.name for spec in b.specs()] == ["teacher-b-0", "teacher-b-1", "teacher-b-2"]
    assert max(len(pickle.dumps(spec)) for setup in (a, b) for spec in setup.specs()) <= 16 * 1024


def test_rows_are_routed_by_their_source_or_by_another_column() -> None:
    assert configure.teacher_routing(config_of(*TAUGHT)).column == ""
    settings = ("distillation.batch_rows=4", "distillation.on_teacher_failure=drop", "data.source_key=topic")
    settings += ("rollout.on_incomplete_group=drop",)
    routing = configure.teacher_routing(config_of("mode=distill", "teachers.a.path=big", *settings))
    assert (routing.column, routing.batch_rows, routing.drops_groups) == ("data_source", 4, True)


def test_the_student_learns_from_the_teachers_in_the_configs_order() -> None:
    more = ("distillation.loss=k3", "distillation.loss_max=3", "algorithm.clip_high=0.3")
    more += ("distillation.update=policy_gradient",)
    spec = configure.actor_spec(config_of(*TAUGHT, *more), TAUGHT_PATHS, special_ids=(1, 2))
    assert spec.distill is not None
    assert [(head.name, head.path) for head in spec.distill.teachers] == [("a", "big"), ("b", "the-model")]
    assert (spec.distill.loss, spec.distill.loss_max, spec.distill.options.clip_high) == ("k3", 3, 0.3)
    assert spec.distill.special_ids == (1, 2)
    unmasked = configure.actor_spec(
        config_of(*TAUGHT, "distillation.mask_special=false"), TAUGHT_PATHS, special_ids=(1,)
    )
    assert unmasked.distill is not None
    assert unmasked.distill.special_ids == ()
    assert configure.actor_spec(config_of(), PATHS).distill is None


@pytest.mark.parametrize("preset", ["quickstart", "ppo-tiny", "grpo-7b", "ppo-7b"])
def test_what_a_process_is_sent_is_small(preset: str) -> None:
    config = config_of(preset=preset)
    specs = [
        configure.actor_spec(config, PATHS),
        configure.critic_spec(config, PATHS),
        configure.estimator_spec(config, PATHS),
        configure.rollout_spec(config, PATHS, (2,)),
    ]
    assert max(len(pickle.dumps(spec)) for spec in specs) < 64 * 1024
