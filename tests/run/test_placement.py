"""What a run asks of Ray, and the arithmetic when there is too little."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.errors import PreflightError
from tqppo.run.placement import Demand, check_resources, demands, process_shares


def test_resources_that_suffice_pass() -> None:
    check_resources([Demand("actor", 2, 1.0, 0.5), Demand("engine", 2, 1.0, 0.5)], {"CPU": 4.0, "GPU": 2.0})


def test_missing_resources_are_shown_with_the_arithmetic() -> None:
    demands = [Demand("actor", 2, 1.0, 1.0), Demand("rollout", 3, 1.5)]
    with pytest.raises(PreflightError) as error:
        check_resources(demands, {"CPU": 4.0})
    message = str(error.value)
    assert "the plan needs 6.5 CPUs, the cluster has 4: actor 2 × 1 + rollout 3 × 1.5 = 6.5" in message
    assert "the plan needs 2 GPUs, the cluster has 0: actor 2 × 1 = 2" in message


def config_of(*overrides: str) -> object:
    return compile_config(None, [], list(overrides), {}).draft


def test_roles_that_take_turns_fit_on_one_device() -> None:
    config = config_of("mode=ppo", "cluster.gpus_per_node=1")
    share = process_shares(config)
    assert [demand.role for demand in demands(config)] == ["actor", "critic", "rollout"]
    assert sum(demand.processes * demand.gpus for demand in demands(config)) == pytest.approx(1.0)
    assert share.engine_gpus == pytest.approx(1 / 3)


def test_roles_with_devices_of_their_own_ask_for_whole_ones() -> None:
    config = config_of("cluster.gpus_per_node=4", "cluster.colocate=false", "actor.ranks=2", "rollout.replicas=2")
    assert [(demand.role, demand.processes, demand.gpus) for demand in demands(config)] == [
        ("actor", 2, 1.0),
        ("rollout", 2, 1.0),
    ]


TEACHERS = (
    "mode=distill",
    "teachers.a.path=a",
    'teachers.a.match=["x"]',
    "teachers.b.path=b",
    'teachers.b.match=["y"]',
)


def test_teachers_on_cpus_share_the_cores_with_the_others() -> None:
    found = demands(config_of(*TEACHERS))
    assert [demand.role for demand in found] == ["actor", "rollout", "teacher a", "teacher b"]
    assert sum(demand.processes * demand.cpus for demand in found) == pytest.approx(1.0)


def test_teachers_have_gpus_of_their_own_and_attached_ones_need_nothing() -> None:
    more = ("cluster.gpus_per_node=1", "distillation.gpus_per_node=4", "teachers.a.backend=vllm")
    more += ("teachers.a.tensor_parallel=2", "teachers.a.replicas=2", "teachers.b.backend=vllm")
    found = {each.role: each for each in demands(config_of(*TEACHERS, *more, 'teachers.b.endpoints=["http://h:1"]'))}
    assert (found["teacher a"].processes, found["teacher a"].gpus) == (2, 2.0)
    assert (found["teacher b"].processes, found["teacher b"].gpus, found["teacher b"].cpus) == (1, 0.0, 0.0)
    assert found["actor"].gpus == 0.5
