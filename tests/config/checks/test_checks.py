"""Checks across sections, with the numbers of the specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config import facts
from tqppo.config.checks.columns import missing_columns
from tqppo.config.checks.devices import gpu_needs
from tqppo.config.checks.effect import RULES
from tqppo.config.checks.registry import CHECKS, nearest_numbers
from tqppo.config.checks.run import run_checks
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic, render_text
from tqppo.config.facts import required_multiple
from tqppo.config.plan.storage import storage_bytes
from tqppo.config.schema import section_of, settings
from tqppo.config.sections import Config
from tqppo.engines.capabilities import BUILT_IN
from tqppo.units import GIB


def found(*sets: str) -> list[Diagnostic]:
    return compile_config(None, [], sets, {}).diagnostics


def codes(*sets: str) -> list[str]:
    return [each.code for each in found(*sets)]


def batch(*, ranks: int, mini: int, group: int, size: int, critic: int = 0) -> tuple[str, ...]:
    sets = [f"actor.ranks={ranks}", f"actor.mini_batch_size={mini}", f"rollout.group_size={group}"]
    sets += [f"data.batch_size={size}", f"mode={'ppo' if critic else 'grpo'}"]
    return (*sets, f"critic.mini_batch_size={critic}", f"critic.ranks={ranks}") if critic else tuple(sets)


@pytest.mark.parametrize(
    ("sets", "multiple", "padding"),
    [
        (batch(ranks=2, mini=15, group=8, size=45), 120, 0),
        (batch(ranks=8, mini=32, group=8, size=128), 256, 0),
        (batch(ranks=8, mini=192, group=8, size=256, critic=256), 6144, 4096),
        (batch(ranks=7, mini=32, group=8, size=128), 1792, 768),
    ],
)
def test_required_multiple_is_the_specifications(sets: tuple[str, ...], multiple: int, padding: int) -> None:
    config = compile_config(None, [], sets, {}).draft
    rows = config.data.batch_size * config.rollout.group_size
    assert (required_multiple(config), -rows % multiple) == (multiple, padding)


def test_padding_over_the_batch_is_a_warning_and_uneven_ranks_an_error() -> None:
    assert codes(*batch(ranks=8, mini=192, group=8, size=256, critic=256)) == ["W203"]
    assert codes(*batch(ranks=7, mini=32, group=8, size=128)) == ["E201"]
    assert codes(*batch(ranks=2, mini=15, group=8, size=32)) == ["W205"]
    assert codes(*batch(ranks=8, mini=32, group=8, size=128)) == []


def test_the_nearest_values_that_are_offered_work() -> None:
    (problem,) = found(*batch(ranks=6, mini=10, group=8, size=40))
    assert "actor.mini_batch_size = 9 or 12, or actor.ranks = 5 or 8" in problem.fix
    assert codes(*batch(ranks=6, mini=12, group=8, size=36)) == []
    assert codes(*batch(ranks=8, mini=10, group=8, size=40)) == []


def test_whole_batch_updates_are_checked_against_the_ranks_too() -> None:
    (problem,) = found("data.batch_size=5", "rollout.group_size=3", "actor.ranks=2")
    assert (problem.code, problem.key) == ("E201", "data.batch_size")


@pytest.mark.parametrize("loss", ["k2", "k3", "abs", "forward_kl_topk", "reverse_kl_topk"])
def test_every_supervised_loss_but_k1_is_accepted(loss: str) -> None:
    teacher = ("mode=distill", "teachers.t.path=t")
    assert codes(*teacher, f"distillation.loss={loss}") == []
    assert codes(*teacher, "distillation.loss=k1") == ["E305"]
    assert codes(*teacher, "distillation.loss=k1", "distillation.update=policy_gradient") == []


def teachers(nodes: int, gpus: int, *sizes: tuple[int, int]) -> tuple[str, ...]:
    """A pool, and a teacher for each (replicas, GPUs each)."""
    sets = ["mode=distill", f"distillation.nodes={nodes}", f"distillation.gpus_per_node={gpus}", "data.train=x.jsonl"]
    for i, (replicas, size) in enumerate(sizes):
        name = f"teachers.t{i}"
        sets += [f"{name}.path=p", f"{name}.backend=vllm", f'{name}.match=["s{i}"]']
        sets += [f"{name}.replicas={replicas}", f"{name}.tensor_parallel={size}"]
    return tuple(sets)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (teachers(1, 8, (1, 4), (2, 2)), []),
        (teachers(2, 8, (2, 8)), []),
        (teachers(2, 4, (1, 8)), []),  # a replica of two whole nodes does not straddle
        (teachers(1, 8, (1, 4)), ["E503"]),
        (teachers(1, 8, (3, 4)), ["E503"]),
        (teachers(2, 3, (3, 2)), ["E504"]),
        (teachers(2, 4, (1, 2), (1, 4), (1, 2)), ["E504"]),
        (teachers(1, 0, (1, 2)), ["E502"]),
        (teachers(1, 0, (1, 1)), []),
    ],
)
def test_teacher_pools_add_up_and_replicas_stay_together(pool: tuple[str, ...], expected: list[str]) -> None:
    assert codes(*pool) == expected


def test_teachers_that_attach_to_servers_need_no_pool() -> None:
    sets = ["mode=distill", "teachers.t.path=p", "teachers.t.backend=vllm", 'teachers.t.endpoints=["http://a:1"]']
    assert codes(*sets, "cluster.gpus_per_node=1") == []


def test_several_teachers_need_routes() -> None:
    sets = ["mode=distill", "teachers.a.path=p", "teachers.b.path=p", 'teachers.b.match=["x"]']
    assert codes(*sets) == ["E508"]


@pytest.mark.parametrize("section", ["critic", "distillation", "reference", "reward_model"])
def test_settings_of_a_role_that_is_absent_are_errors(section: str) -> None:
    key = {"critic": "lr=3e-3", "distillation": "loss_max=2.0", "reference": "ranks=2", "reward_model": "ranks=2"}
    assert codes(f"{section}.{key[section]}") == ["E303"]


def test_a_default_value_written_out_is_not_a_mistake() -> None:
    assert codes("critic.lr=1e-5", "reference.ranks=1") == []


def test_rules_speak_of_keys_that_exist() -> None:
    for rule in RULES:
        for key in (*rule.keys, *rule.causes):
            section = key.partition(".")[0]
            assert key in settings() or (key.endswith(".*") and section_of(section)) or key == "mode", key


@pytest.mark.parametrize("mode", ["ppo", "grpo", "distill"])
def test_every_mode_writes_the_columns_that_it_reads(mode: str) -> None:
    sets = [f"mode={mode}", *(["teachers.t.path=t"] if mode == "distill" else [])]
    config = compile_config(None, [], sets, {})
    assert missing_columns(config.draft) == []
    assert facts.stages(config.draft)[-1].name == "actor.update"


def test_capabilities_gate_features_by_engine() -> None:
    for name, able in BUILT_IN.items():
        sets = (f"rollout.backend={name}", "rollout.tensor_parallel=2", "cluster.gpus_per_node=2")
        assert ("E402" in codes(*sets)) == (not able.tensor_parallel)


def test_devices_are_counted_for_roles_of_their_own() -> None:
    sets = ("cluster.gpus_per_node=4", "cluster.colocate=false", "actor.ranks=2", "rollout.replicas=2")
    assert codes(*sets) == []
    assert codes(*sets, "rollout.replicas=3") == ["E407"]


def test_one_compilation_reports_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = '[rollout]\ngroup_size = 1\n[actor]\nlrr = 1\nepochs = 0\n[storage]\nbackend = "s3"\n'
    path.write_text(f'mode = "grpo"\n{text}')
    diagnostics = compile_config(None, [path], ["run.seed=x"], {"TQPPO__DATA__SIZE": "-1"}).diagnostics
    assert sorted(each.code for each in diagnostics) == ["E101", "E103", "E105", "E105", "E204", "E401"], render_text(
        diagnostics
    )


def test_an_array_of_teacher_tables_says_how_to_write_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('mode = "distill"\n[[teachers]]\nkey = "math"\n')
    (problem,) = compile_config(None, [path], environ={}).diagnostics
    assert (problem.code, problem.fix) == ("E107", "write [teachers.NAME], one table per teacher")


def test_rounds_of_new_prompts_bound_filtering_and_refilling_alike() -> None:
    assert codes("algorithm.filter_max_rounds=2") == ["E303"]
    assert codes("algorithm.filter_max_rounds=2", "algorithm.filter_groups=true") == []
    assert codes("algorithm.filter_max_rounds=2", "rollout.on_incomplete_group=refill") == []


def test_a_policy_for_short_batches_needs_rounds_of_new_prompts() -> None:
    assert codes("rollout.on_short_batch=error") == ["E303"]
    assert codes("rollout.on_short_batch=error", "rollout.on_incomplete_group=refill") == []


def test_credit_finer_than_a_session_needs_an_agent_and_turns_their_estimator() -> None:
    agent = ("rollout.agent=mine.py:Loop", "rollout.max_trajectories=2")
    assert codes("algorithm.credit=turn") == ["E303"]
    assert codes(*agent, "algorithm.credit=trajectory") == []
    assert codes(*agent, "algorithm.turn_gamma=0.5") == ["E303"]
    assert codes(*agent, "algorithm.credit=turn", "algorithm.turn_gamma=0.5") == []
    assert codes(*agent, "algorithm.advantage=gigpo", "algorithm.turn_gamma=0.5", "algorithm.gigpo_weight=2.0") == []
    assert codes(*agent, "algorithm.gigpo_weight=2.0") == ["E303"]
    assert codes(*agent, "algorithm.advantage=gigpo", "algorithm.credit=turn") == ["E303"]


def test_a_kl_without_weight_has_no_effect_and_needs_no_reference() -> None:
    assert codes("algorithm.kl_loss=k3") == ["W306"]
    assert codes("algorithm.kl_reward=k1") == ["W306"]
    assert codes("algorithm.kl_loss=k3", "reference.path=base") == ["E303", "W306"]
    assert codes("algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.01", "reference.path=base") == []
    assert codes("mode=distill", "teachers.t.path=t", "algorithm.kl_loss=k3") == ["E303"]


def test_a_reference_of_its_own_has_an_effect_with_lora() -> None:
    sets = ["model.lora_rank=8", "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.01"]
    assert codes(*sets, "reference.path=base", "reference.ranks=2") == []
    config = compile_config(None, [], [*sets, "reference.path=base"], {}).draft
    assert facts.has_own_reference(config)
    assert gpu_needs(config)["reference.ranks"] == 1
    assert not facts.has_own_reference(compile_config(None, [], sets, {}).draft)


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (("data.train=sort",), "E411"),
        (("data.train=[]",), "E409"),
        (("data.train=task:sort", "data.task_args.digits=0"), "E410"),
        (("reward.function=gsm8",), "E416"),
        (("rollout.agent=tool",), "E408"),
        (("rollout.agent=tools",), "E419"),
        (("rollout.agent=tools", 'rollout.agent_args.tools=["add"]'), "E419"),
        (("rollout.agent=tools", 'rollout.agent_args.tools=["/nowhere/t.py:add"]'), "E419"),
        (("rollout.agent=tools", 'rollout.agent_args.tools=["m:add"]', "rollout.agent_args.turns=3"), "E418"),
        (("rollout.agent=tools", 'rollout.agent_args.tools=["m:add"]', "rollout.agent_args.max_turns=many"), "E421"),
        (("rollout.agent=tools", 'rollout.agent_args.tools=["m:add"]', "rollout.agent_args.memory_gb=-1"), "E421"),
        (("rollout.agent=tools", "rollout.agent_args.tools=m:add"), "E421"),
        (("rollout.agent=environment", "rollout.agent_args.environment=3"), "E421"),
        (("rollout.agent=environment",), "E419"),
        (("actor.warmup_steps=100",), "W312"),
        (("model.path=Qwen/Qwen2.5-7B", "warm_start.steps=5", "warm_start.lr=3e-3", "warm_start.data=a.jsonl"), "W313"),
        (("model.path=Qwen/Qwen2.5-7B", "warm_start.steps=5"), "E303"),
        (("checkpoint.interval=10", "checkpoint.keep_every=15"), "E414"),
        (("reward.overlong_buffer=256",), "E209"),
        (("model.num_heads=3",), "E210"),
        (("mode=ppo", "model.path=Qwen/Qwen2.5-7B", "critic.path=meta-llama/Llama-3.1-8B"), "E211"),
        (("storage.budget_gb=0.0001",), "W212"),
        (("rollout.ahead=1",), "W314"),
        (("mode=ppo", "rollout.ahead=1", "cluster.gpus_per_node=1", "algorithm.old_logprobs=rollout"), "E424"),
        (("actor.ranks=4", "actor.context_parallel=3", "model.num_heads=6", "model.hidden_size=96"), "E213"),
        (("actor.ranks=4", "actor.context_parallel=4"), "E214"),
        (("actor.ranks=2", "actor.context_parallel=2", "model.attention=eager"), "E303"),
        (("rollout.group_size=1", "mode=ppo", "algorithm.filter_groups=true"), "E415"),
        (("rollout.backend=vllm", "run.deterministic=true"), "W403"),
        (("rollout.backend=vllm", 'rollout.endpoints=["http://a:1"]', "rollout.replicas=2"), "E404"),
    ],
)
def test_each_mistake_has_its_code(sets: tuple[str, ...], code: str) -> None:
    assert codes(*sets) == [code]


@pytest.mark.parametrize(
    "sets",
    [
        ("algorithm.correction=token",),
        ("algorithm.reject=seq_mean",),
        ("algorithm.old_logprobs=rollout",),
        ("algorithm.old_logprobs=rollout", "cluster.gpus_per_node=2", "cluster.colocate=false"),
    ],
)
def test_what_goes_with_sampling_ahead_needs_no_message(sets: tuple[str, ...]) -> None:
    assert codes("rollout.ahead=2", *sets) == []


def test_a_step_fits_the_storage_and_two_do_not() -> None:
    needed = storage_bytes(compile_config(None, [], [], {}).draft)[0] / GIB
    assert codes(f"storage.budget_gb={1.5 * needed}") == []
    ahead = ("rollout.ahead=1", "algorithm.old_logprobs=rollout")
    assert codes(f"storage.budget_gb={1.5 * needed}", *ahead) == ["W212"]


SHARED = ("actor.ranks=4", "actor.context_parallel=2")


def test_ranks_that_share_rows_count_as_one_where_rows_are_divided() -> None:
    six = batch(ranks=4, mini=0, group=2, size=5)
    assert codes(*six) == ["E201"]
    assert codes(*six, "actor.context_parallel=2") == []
    (mistake,) = found(*batch(ranks=4, mini=0, group=3, size=5), "actor.context_parallel=2")
    assert "15 rows cannot be shared evenly by 2 groups of 2 ranks" in mistake.message
    config = compile_config(None, [], [*six, "actor.context_parallel=2"], {}).config
    assert config is not None
    assert required_multiple(config) == 2


def test_a_row_may_be_as_long_as_what_the_ranks_that_share_it_take() -> None:
    long = ("rollout.max_new_tokens=3000", "actor.micro_batch_tokens=2048")
    assert codes(*long) == ["E208"]
    assert codes(*long, *SHARED) == []
    (mistake,) = found("rollout.max_new_tokens=3000", "actor.micro_batch_tokens=1024", *SHARED)
    assert "because 2 ranks share a row" in mistake.allowed


def test_every_check_reads_settings_that_exist() -> None:
    for each in CHECKS:
        for key in each.reads:
            assert key in settings() or section_of(key.removesuffix(".*")), (each.function.__name__, key)


def test_a_check_is_skipped_while_a_key_that_it_reads_is_unresolved() -> None:
    config = Config.model_validate({"data": {"batch_size": 24}, "actor": {"mini_batch_size": 32}})
    assert [each.code for each in run_checks(config, {}, frozenset())] == ["E202"]
    for unresolved in ("data.batch_size", "actor.*", "*"):
        assert run_checks(config, {}, frozenset({unresolved})) == []


def test_the_nearest_working_numbers_are_below_and_above() -> None:
    assert nearest_numbers(10, lambda n: n % 4 == 0, at_most=20) == "8 or 12"
    assert nearest_numbers(10, lambda n: n % 4 == 0, at_most=11) == "8"
