"""How many threads each process gets: all the cores that no other process needs meanwhile."""

from __future__ import annotations

import pytest

from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.config.placement import runs_at_once
from tqppo.config.plan.machine import on_this_machine, usable_cores
from tqppo.config.plan.plan import make_plan
from tqppo.config.plan.text import plan_text
from tqppo.config.sections import Config

MEDIUM = ("model.hidden_size=128", "model.num_layers=4", "model.num_heads=4")


def config_of(preset: str, *settings: str) -> Config:
    found = compile_config(preset, overrides=list(settings), environ={}).config
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("preset", "settings", "trainer", "engine"),
    [
        ("quickstart", (), 1, 1),  # a run from before cores were written down
        ("quickstart", ("run.cores=2",), 2, 1),  # a small model decodes on one
        ("quickstart", ("run.cores=2", *MEDIUM), 2, 2),
        ("quickstart", ("run.cores=8", "rollout.replicas=2", *MEDIUM), 8, 4),
        ("quickstart", ("run.cores=8", "actor.ranks=2", *MEDIUM), 4, 8),
        ("ppo-tiny", ("run.cores=2", *MEDIUM), 1, 2),  # actor and critic learn at the same time
        ("ppo-tiny", ("run.cores=8", *MEDIUM), 4, 8),
        ("quickstart", ("run.cores=2", "run.threads=3"), 3, 3),
        ("quickstart", ("run.cores=2", "rollout.ahead=1"), 1, 1),  # engines and actor compute at the same time
        ("quickstart", ("run.cores=8", "rollout.ahead=1", "model.hidden_size=256"), 4, 4),
        ("quickstart", ("run.cores=2", "rollout.backend=vllm", *MEDIUM), 2, 1),
        ("distill-tiny", ("run.cores=2", *MEDIUM), 2, 1),
        ("quickstart", ("run.cores=8", "cluster.gpus_per_node=1", *MEDIUM), 0, 1),
    ],
)
def test_processes_share_the_cores(preset: str, settings: tuple[str, ...], trainer: int, engine: int) -> None:
    config = config_of(preset, *settings)
    assert (facts.worker_threads(config), facts.engine_threads(config)) == (trainer, engine)


@pytest.mark.parametrize(
    ("preset", "settings", "expected"),
    [
        ("ppo-tiny", ("run.cores=2",), True),  # one thread each
        ("ppo-tiny", ("run.cores=8",), True),
        ("ppo-tiny", ("run.cores=2", "run.threads=2"), False),  # four threads on two cores
        ("quickstart", ("run.cores=2", "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.1"), False),
    ],
)
def test_roles_compute_at_once_where_their_threads_have_cores(
    preset: str, settings: tuple[str, ...], expected: bool
) -> None:
    assert runs_at_once(config_of(preset, *settings)) == expected


def test_the_machines_cores_are_written_down_unless_the_config_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, said = (compile_config("quickstart", overrides=each, environ={}) for each in ([], ["run.cores=7"]))
    assert on_this_machine(one).draft.run.cores == usable_cores() >= 1
    assert on_this_machine(said).draft.run.cores == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert on_this_machine(one).draft.run.cores == 1


def test_the_plan_says_how_many_threads_there_are() -> None:
    shared = compile_config("quickstart", overrides=["run.cores=2"], environ={})
    assert "threads  rollout 1, actor 2 (each process; 2 cores)" in plan_text(make_plan(shared))
    alone = compile_config("quickstart", overrides=["run.cores=1"], environ={})
    assert "threads" not in plan_text(make_plan(alone))
