"""A run that does not fit is refused, with settings that make it fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tqppo.config.checks.machine import check_machine, lacking
from tqppo.config.checks.registry import Context
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.plan import machine
from tqppo.config.plan.budget import make_budget
from tqppo.config.plan.machine import Machine, this_machine
from tqppo.config.plan.memory import total
from tqppo.config.plan.remedies import changed
from tqppo.errors import PreflightError
from tqppo.units import GIB

LARGE = Machine(memory=4096 * GIB, shared=1024 * GIB, disk=8192 * GIB, gpu=80 * GIB)
ON_CPU = ("cluster.gpus_per_node=0", "cluster.gpu_memory_gb=0", "rollout.tensor_parallel=1", "rollout.replicas=1")


def problems(preset: str, *sets: str) -> list[Diagnostic]:
    return [each for each in compile_config(preset, [], sets, {}).diagnostics if each.code == "E422"]


def suggestions(fix: str) -> list[list[str]]:
    """The settings of a fix: a list for each alternative."""
    return [re.findall(r"([a-z_.]+) = ([\w.]+)", part) for part in fix.split(", or ")]


def context_of(preset: str, *sets: str) -> Context:
    compilation = compile_config(preset, [], sets, {})
    assert compilation.ok, compilation.diagnostics
    return Context(compilation.draft, compilation.origins)


@pytest.mark.parametrize(
    "sets",
    [
        ("actor.ranks=1", "rollout.replicas=1", "reference.ranks=1", "cluster.gpus_per_node=1"),
        ("actor.gradient_checkpointing=false",),
        ("cluster.gpu_memory_gb=24",),
    ],
)
def test_every_setting_that_a_message_names_makes_it_fit(sets: tuple[str, ...]) -> None:
    found = problems("grpo-7b", *sets)
    assert found
    for each in found:
        for settings in suggestions(each.fix) if each.fix.startswith("set") else ():
            more = [f"{key}={value}" for key, value in settings]
            again = [other.message for other in problems("grpo-7b", *sets, *more)]
            assert each.message.partition(":")[0] not in {message.partition(":")[0] for message in again}, more


def test_an_engine_whose_share_is_smaller_than_its_weights_is_refused() -> None:
    (found,) = problems("grpo-32b", "rollout.memory_fraction=0.15")
    assert "an engine needs at least" in found.message
    assert "rollout.memory_fraction = 0.3" in found.fix


def test_without_a_size_nothing_is_compared() -> None:
    assert not problems("grpo-7b", "cluster.gpu_memory_gb=0", "actor.gradient_checkpointing=false")


def test_a_seven_billion_actor_on_a_small_machine_is_refused_before_anything_starts() -> None:
    small = Machine(memory=23 * GIB, shared=11 * GIB, disk=400 * GIB)
    with pytest.raises(PreflightError, match=r"E612(?s:.*)this machine has 23.0 GiB"):
        check_machine(context_of("grpo-7b", *ON_CPU), small)


def test_each_lack_is_named_with_its_sum() -> None:
    context = context_of("grpo-7b", "cluster.gpu_memory_gb=0")
    assert not list(lacking(context, LARGE))
    found = {each.code: each for each in lacking(context, Machine(64 * GIB, 1 * GIB, 10 * GIB, 16 * GIB))}
    assert set(found) == {"E612", "W613", "E614", "E615"}
    assert "rollout: at rest 113 GiB" in found["E612"].found
    assert "--shm-size=32g" in found["W613"].fix
    assert "checkpoints 255 GiB + export 14.2 GiB" in found["E614"].found


def test_of_a_cluster_that_is_joined_only_the_disk_is_looked_at() -> None:
    context = context_of("grpo-7b", "cluster.address=auto", "cluster.gpu_memory_gb=0")
    found = [each.code for each in lacking(context, Machine(1 * GIB, 1 * GIB, 10 * GIB, 1 * GIB))]
    assert found == ["E614"]


def test_a_remedy_for_memory_is_one_that_works() -> None:
    context = context_of(
        "quickstart", "model.path=Qwen/Qwen2.5-0.5B", "actor.micro_batch_tokens=16384", "warm_start.steps=0"
    )
    needed = total(make_budget(context.config).host)
    (found,) = lacking(context, Machine(needed - 1, LARGE.shared, LARGE.disk))
    assert found.fix.startswith("set ")
    ((key, value), *_) = suggestions(found.fix)[0]
    setting = True if value == "true" else int(value)
    assert total(make_budget(changed(context.config, {key: setting})).host) < needed


def test_this_machine_has_memory_and_room(tmp_path: Path) -> None:
    found = this_machine(tmp_path / "runs" / "not-there-yet")
    assert 0.5 * GIB < found.memory < 2**50
    assert found.disk > 0


def test_the_driver_is_asked_for_the_smallest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '81559\\n24564\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.smallest_gpu() == 24564 * 2**20
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert machine.smallest_gpu() == 0


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "memory.max",))
    assert machine.installed_memory() == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.installed_memory() > 2**30
