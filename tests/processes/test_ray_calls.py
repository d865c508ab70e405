"""Calls of Ray actors, and what only they can do: die."""

from __future__ import annotations

import os

import pytest
import ray
from ray.actor import ActorProxy

from tqppo.devices.seats import NO_CPU
from tqppo.errors import EngineError, WorkerError
from tqppo.processes.hosting import Hosting, results, settle
from tqppo.processes.ray_calls import call, kill, num_nodes
from tqppo.processes.ray_launcher import RayLauncher

pytestmark = pytest.mark.usefixtures("local_ray")


class Mortal:
    def ready(self) -> int:
        return 1

    def fail(self) -> int:
        return 1 // 0

    async def wait(self) -> int:
        import asyncio

        await asyncio.sleep(60)
        return 0

    def end(self) -> int:
        os._exit(1)


@pytest.mark.parametrize("died", [WorkerError, EngineError])
def test_a_dead_process_is_named_with_the_error_the_caller_chose(died: type[WorkerError] | type[EngineError]) -> None:
    mortal = RayLauncher().launch(Hosting(NO_CPU), Mortal)
    with pytest.raises(died, match="the mortal: the process died"):
        results([mortal.call(Mortal.end)], 60, "the mortal", died=died)


def test_settle_reports_every_failure_within_the_grace_period_and_the_calls_without_a_result() -> None:
    mortals = [RayLauncher().launch(Hosting(NO_CPU), Mortal) for _ in range(3)]
    results([each.call(Mortal.ready) for each in mortals], 60, "the mortals")
    calls = [mortals[0].call(Mortal.fail), mortals[1].call(Mortal.wait), mortals[2].call(Mortal.end)]
    settled = settle(calls, 60, grace_s=10.0)
    assert set(settled.failures) == {0, 2}
    assert settled.pending == (1,)
    mortals[1].kill()


class Doubler:
    def double(self, value: int, *, plus: int = 0) -> int:
        return 2 * value + plus

    async def later(self, value: int) -> int:
        return 2 * value


def double_until_it_fails(doubler: ActorProxy[Doubler]) -> None:
    """Ray kills in the background, so that calls shortly after `kill` may still be answered."""
    for _ in range(1000):
        ray.get(call(doubler, Doubler.double, 3), timeout=60)


def test_methods_are_called_by_the_function_itself() -> None:
    doubler = ray.remote(Doubler).options(num_cpus=0).remote()
    calls = [call(doubler, Doubler.double, 3, plus=1), call(doubler, Doubler.later, 4)]
    assert ray.get(calls, timeout=60) == [7, 8]
    kill(doubler)
    kill(doubler)
    with pytest.raises(ray.exceptions.RayActorError):
        double_until_it_fails(doubler)


def test_a_private_ray_has_one_node() -> None:
    assert num_nodes() == 1
