"""What a run asks of Ray, the arithmetic when there is too little, and the seats that processes get on fake GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.run.placement import check_resources, demands, process_reservation

GPUS = Path(__file__).parent / "fake_cluster.py"


def config_of(*overrides: str, preset: str | None = None) -> Config:
    return compile_config(preset, [], list(overrides), {}).draft


def test_resources_that_suffice_pass() -> None:
    check_resources(config_of(preset="grpo-7b"), [{"CPU": 8.0, "GPU": 8.0}])
    check_resources(config_of(preset="distill-7b"), [{"CPU": 8.0, "GPU": 8.0}] * 2)


def test_missing_cpus_are_shown_with_the_arithmetic() -> None:
    config = config_of("actor.ranks=2", "rollout.replicas=3", "cluster.cpus_per_worker=3")
    with pytest.raises(PreflightError) as error:
        check_resources(config, [{"CPU": 4.0}])
    assert "the plan needs 7.5 CPUs, the cluster has 4: actor 2 × 1.5 + rollout 3 × 1.5 = 7.5" in str(error.value)


@pytest.mark.parametrize("gpus", [[7.0], [4.0, 4.0], []])
def test_missing_gpus_are_shown_per_node(gpus: list[float]) -> None:
    with pytest.raises(PreflightError, match=r"needs nodes with 8 GPUs, the cluster's have .*: no machine for 1"):
        check_resources(config_of(preset="grpo-7b"), [{"CPU": 64.0, "GPU": count} for count in gpus] or [{"CPU": 64.0}])


def test_a_large_machine_holds_several_nodes_of_the_plan() -> None:
    check_resources(config_of(preset="distill-7b"), [{"CPU": 64.0, "GPU": 16.0}])


def test_nodes_without_gpus_must_exist_too() -> None:
    with pytest.raises(PreflightError, match=r"cluster\.nodes is 2, and the cluster has 1"):
        check_resources(config_of("cluster.nodes=2"), [{"CPU": 64.0}])


def test_roles_that_take_turns_fit_on_one_device() -> None:
    config = config_of("mode=ppo", "cluster.gpus_per_node=1")
    reservation = process_reservation(config, placement_of(config))
    assert reservation.gpus == pytest.approx(1 / 3)
    assert reservation.cpus == pytest.approx(1 / 3)


def test_roles_with_devices_of_their_own_count_whole_ones() -> None:
    config = config_of("cluster.gpus_per_node=4", "cluster.colocate=false", "actor.ranks=2", "rollout.replicas=2")
    assert process_reservation(config, placement_of(config)).gpus == 1.0


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
    config = config_of(*TEACHERS, *more, 'teachers.b.endpoints=["http://h:1"]')
    reservation = process_reservation(config, placement_of(config))
    assert (reservation.gpus, reservation.teacher_gpus, reservation.teacher_cpus) == (0.5, 1.0, 1.0)
    assert [(each.role, each.processes, each.cpus) for each in demands(config)] == [
        ("GPUs", 5, 1.0),
        ("teacher b", 1, 0.0),
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 4])
def test_processes_sit_where_the_placement_says(nodes: int) -> None:
    """On fake GPUs: devices distinct within a role, an engine's on one node and disjoint from other replicas'."""
    done = subprocess.run([sys.executable, str(GPUS), str(nodes)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "placed"
