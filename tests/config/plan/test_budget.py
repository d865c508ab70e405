"""Sums of memory per device and stage, per node, in /dev/shm and on the disk, worked by hand."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.plan.budget import ASLEEP, DEVICE_CONTEXT, INTERPRETER, SERVERS, MemoryBudget, make_budget
from tqppo.config.plan.budget_text import budget_text
from tqppo.config.plan.memory import total
from tqppo.config.plan.roles import planned_roles
from tqppo.config.sections import Config
from tqppo.units import GIB

N = 7_615_487_488


def config_of(preset: str, *sets: str) -> Config:
    compilation = compile_config(preset, [], sets, {})
    assert compilation.ok
    return compilation.draft


def held(budget: MemoryBudget, stage: str) -> dict[str, float]:
    found = next(each for each in budget.stages if each.stage == stage)
    return {part.name: part.num_bytes for part in found.held}


def test_colocated_roles_take_turns_on_a_gpu() -> None:
    config = config_of("ppo-7b")
    budget = make_budget(config)
    stages = [stage.stage for stage in budget.stages]
    assert stages == ["generate", "compute actor", "compute critic", "compute reference", "load weights"]
    # engine, actor, critic and reference have a process each on every GPU
    assert held(budget, "generate") == {"engine": 0.6 * 80 * GIB, "contexts": 4 * DEVICE_CONTEXT}
    actor = next(role for role in planned_roles(config) if role.name == "actor")
    computing = held(budget, "compute actor")
    assert computing["engine asleep"] == ASLEEP
    assert sum(computing.values()) == total(actor.memory) + ASLEEP + 3 * DEVICE_CONTEXT
    assert held(budget, "load weights")["engine's weights"] == 2 * N
    assert not budget.overfull


def test_a_copy_to_save_in_the_background_is_in_the_node_s_memory() -> None:
    plain = {part.name: part.num_bytes for part in make_budget(config_of("ppo-7b")).host}
    behind = {part.name: part.num_bytes for part in make_budget(config_of("ppo-7b", "checkpoint.background=true")).host}
    more = {name: num_bytes for name, num_bytes in behind.items() if name not in plain}
    assert more["actor: copy to save"] == pytest.approx(12 * N, rel=0.01)  # float32 weights and two moments
    assert sorted(more) == ["actor: copy to save", "critic: copy to save"]


def test_nodes_with_a_copy_each_hold_more_and_save_one() -> None:
    flat, whole = (
        compile_config("grpo-32b", [], [f"cluster.shard_within_nodes={chosen}"], {}).draft
        for chosen in ("false", "true")
    )
    optimizer = [held(make_budget(config), "compute actor")["optimizer"] for config in (flat, whole)]
    assert optimizer[1] == 4 * optimizer[0]
    assert make_budget(whole).overfull, "32 billion parameters on a node do not fit"
    assert total(make_budget(whole).disk) == pytest.approx(total(make_budget(flat).disk))


def test_without_colocation_each_role_has_its_gpus_to_itself() -> None:
    sets = ("cluster.colocate=false", "cluster.nodes=3", "rollout.memory_fraction=0.9")
    budget = make_budget(config_of("grpo-7b", *sets))
    assert [stage.stage for stage in budget.stages] == ["generate", "compute actor", "compute reference"]
    assert held(budget, "generate") == {"engine": pytest.approx(72 * GIB), "contexts": DEVICE_CONTEXT}
    assert "engine asleep" not in held(budget, "compute actor")


def test_teachers_have_gpus_of_their_own() -> None:
    budget = make_budget(config_of("distill-7b"))
    scoring = [stage for stage in budget.stages if stage.stage == "score"]
    assert [stage.role for stage in scoring] == ["teacher math", "teacher code"]
    assert all(stage.num_bytes == 64 * GIB + DEVICE_CONTEXT for stage in scoring)


def test_roles_at_rest_and_new_weights_are_in_the_node_s_memory() -> None:
    budget = make_budget(config_of("grpo-7b"))
    host = {part.name: part.num_bytes for part in budget.host}
    assert host["actor: at rest"] == 12 * N  # weights and two moments, over all ranks of the node
    assert host["reference: at rest"] == 2 * N
    assert host["rollout: at rest"] == 8 * 2 * N  # eight engines, each with its own copy
    assert host["published weights"] == 2 * 2 * N
    assert host["rollout: interpreters"] == 8 * (INTERPRETER + SERVERS["vllm"])
    assert {part.name for part in budget.shared} == {"one step's columns", "published weights"}


def test_processes_are_spread_over_the_nodes() -> None:
    four, one = (
        make_budget(config_of("grpo-32b", *sets)) for sets in ((), ("cluster.gpus_per_node=32", "cluster.nodes=1"))
    )
    parts = [{part.name: part.num_bytes for part in each.host} for each in (four, one)]
    assert parts[1]["actor: at rest"] == 4 * parts[0]["actor: at rest"]


def test_checkpoints_on_the_disk_are_those_kept_and_one_in_the_making() -> None:
    budget = make_budget(config_of("grpo-7b", "checkpoint.keep_last=3"))
    assert {part.name: part.num_bytes for part in budget.disk} == {"checkpoints": 4 * 12 * N, "export": 2 * N}
    lora = make_budget(config_of("grpo-7b", "checkpoint.keep_last=3", "model.lora_rank=8", "reference.ranks=1"))
    assert total(lora.disk) < total(budget.disk) / 10


def test_a_cpu_run_counts_interpreters_servers_and_the_driver() -> None:
    embedded, vllm = (make_budget(config_of("quickstart", f"rollout.backend={name}")) for name in ("embedded", "vllm"))
    assert not embedded.stages
    assert total(embedded.host) > 2 * GIB  # though its model has 0.5 MB
    assert total(vllm.host) - total(embedded.host) == pytest.approx(SERVERS["vllm"], rel=0.1)


def test_servers_that_run_already_and_models_without_a_shape_are_not_in_the_sums() -> None:
    sets = ("rollout.endpoints=['http://node:8000']", "rollout.replicas=1", "rollout.tensor_parallel=1")
    attached = make_budget(config_of("grpo-7b", *sets))
    assert "generate" not in {stage.stage for stage in attached.stages}
    unknown = make_budget(config_of("grpo-7b", "model.path=acme/new-model"))
    assert unknown.unknown == ("rollout", "actor", "reference")
    assert "Not in these sums" in next(budget_text(unknown))


def test_the_text_has_a_line_for_each_stage_and_place() -> None:
    budget = make_budget(config_of("distill-7b"))
    lines = list(budget_text(budget))
    assert lines[0] == "A GPU of 80.0 GiB holds at most:"
    assert any(line.lstrip().startswith("score (teacher math)") for line in lines)
    assert [line.split(":")[0].strip() for line in lines[-3:]] == [
        "A node's memory",
        "of it in /dev/shm",
        "On the disk",
    ]
    assert any("2·b·N" in line for line in budget_text(budget, formulas=True))
