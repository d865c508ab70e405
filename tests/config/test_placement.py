"""Every process of a config has its devices before anything starts."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of, placement_text, ranks_per_copy
from tqppo.config.plan.plan import make_plan
from tqppo.config.read.presets import list_presets
from tqppo.config.sections import Config
from tqppo.devices.placement import Device, Placement

ON_GPUS = [
    each.name
    for each in list_presets({})
    if not each.name.startswith("base-") and compile_config(each.name, environ={}).draft.cluster.gpus_per_node
]


def config_of(*overrides: str, preset: str | None = None) -> Config:
    return compile_config(preset, [], list(overrides), {}).draft


def assert_sound(placement: Placement) -> None:
    """Devices of a role are distinct and exist; those of one process are on one node."""
    assert not placement.unplaced
    for role, seats in placement.roles.items():
        devices = placement.devices_of(role)
        assert len(set(devices)) == len(devices), role
        assert set(devices) <= set(placement.devices)
        assert all(len({device.node for device in seat}) <= 1 for seat in seats), role


@pytest.mark.parametrize("preset", ON_GPUS)
def test_every_preset_with_gpus_is_placed(preset: str) -> None:
    placement = placement_of(config_of(preset=preset))
    assert_sound(placement)
    assert placement.devices_of("actor")[0] == Device(0, 0)
    teachers = [role for role in placement.roles if role.startswith("teacher")]
    assert all(not placement.neighbours(teacher) for teacher in teachers)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_four_nodes_hold_ranks_and_engines_of_every_size(tensor_parallel: int) -> None:
    sizes = (f"rollout.tensor_parallel={tensor_parallel}", f"rollout.replicas={32 // tensor_parallel}")
    placement = placement_of(
        config_of(*sizes, "cluster.nodes=4", "actor.ranks=32", "reference.ranks=32", preset="grpo-7b")
    )
    assert_sound(placement)
    assert placement.idle == []
    assert placement.roles["actor"][9] == placement.roles["reference"][9] == (Device(1, 1),)


def test_without_colocation_each_role_has_devices_of_its_own_and_ranks_fill_gaps() -> None:
    apart = ("cluster.gpus_per_node=4", "cluster.nodes=2", "cluster.colocate=false", "rollout.backend=vllm")
    placement = placement_of(config_of(*apart, "actor.ranks=2", "rollout.replicas=2", "rollout.tensor_parallel=3"))
    assert_sound(placement)
    assert placement.devices_of("actor") == [Device(0, 3), Device(1, 3)]
    assert placement.neighbours("actor") == frozenset()


def test_replicas_that_leave_gaps_are_an_error_with_the_sizes() -> None:
    wide = ["cluster.gpus_per_node=4", "cluster.nodes=2", "rollout.backend=vllm", "rollout.tensor_parallel=3"]
    codes = {each.code for each in compile_config(None, [], [*wide, "rollout.replicas=2"], {}).diagnostics}
    assert "E407" not in codes
    apart = [*wide, "rollout.replicas=2", "cluster.colocate=false", "actor.ranks=2"]
    assert "E407" not in {each.code for each in compile_config(None, [], apart, {}).diagnostics}
    narrow = ["cluster.gpus_per_node=3", "cluster.nodes=2", "rollout.backend=vllm", "rollout.tensor_parallel=2"]
    found = compile_config(None, [], [*narrow, "rollout.replicas=3"], {}).diagnostics
    (problem,) = [each for each in found if each.code == "E407"]
    assert "1 of the rollout processes have no GPU: replicas of 2 leave gaps" in problem.message


def test_idle_gpus_are_a_warning() -> None:
    found = compile_config(None, [], ["cluster.gpus_per_node=4", "actor.ranks=3"], {}).diagnostics
    (warning,) = [each for each in found if each.code == "W407"]
    assert warning.message == "1 of 1 × 4 = 4 GPUs have nothing to do"


def test_engines_that_run_already_take_no_gpu() -> None:
    attached = ("rollout.backend=vllm", 'rollout.endpoints=["http://h:1", "http://h:2"]', "cluster.gpus_per_node=1")
    placement = placement_of(config_of(*attached))
    assert placement.roles["rollout"] == ((), ())
    assert placement.neighbours("actor") == frozenset()


def test_on_cpus_nothing_is_placed_and_nothing_shown() -> None:
    placement = placement_of(config_of("actor.ranks=2"))
    assert placement.roles == {"actor": ((), ()), "rollout": ((),)}
    assert list(placement_text(placement)) == []


def test_the_plan_shows_nodes_roles_and_idle_gpus() -> None:
    wide = ["rollout.replicas=4", "rollout.tensor_parallel=2"]
    compilation = compile_config("grpo-7b", [], ["actor.ranks=4", "cluster.nodes=2", *wide], {})
    plan = make_plan(compilation)
    text = list(placement_text(plan.placement))
    assert text[0] == "GPUs: nodes × GPUs = 2 × 8"
    assert text[1:] == [
        "  actor      node 0: 0-3",
        "  reference  node 0: 0-7",
        "  rollout    node 0: 0-1 | node 0: 2-3 | node 0: 4-5 | node 0: 6-7",
        "  idle       node 1: 0-7",
    ]
    assert plan.as_dict()["placement"]["roles"]["actor"][1][0] == {"node": 0, "index": 1}


WIDE = ("cluster.gpus_per_node=4", "cluster.nodes=2", "cluster.shard_within_nodes=true", "rollout.backend=vllm")


def test_ranks_share_a_copy_within_their_node() -> None:
    config = config_of(*WIDE, "actor.ranks=8", "rollout.replicas=8")
    assert ranks_per_copy(config, "actor") == 4
    assert ranks_per_copy(config_of(*WIDE, "actor.ranks=4"), "actor") == 4, "all of them sit on the first node"
    assert ranks_per_copy(config_of(*WIDE[:2], "actor.ranks=8"), "actor") == 8
    assert ranks_per_copy(config_of("cluster.nodes=2", WIDE[2], "actor.ranks=4"), "actor") == 2


def test_unequal_shares_of_nodes_and_a_single_node_are_errors() -> None:
    found = compile_config(None, [], [*WIDE, "actor.ranks=6"], {}).diagnostics
    (problem,) = [each for each in found if each.code == "E425"]
    assert problem.message == "nodes have different numbers of the 6 ranks of actor, and so cannot hold a copy each"
    alone = compile_config(None, [], ["cluster.shard_within_nodes=true"], {}).diagnostics
    assert any("one node holds one copy" in each.message for each in alone)
