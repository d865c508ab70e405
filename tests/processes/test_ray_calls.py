from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ray
from ray.actor import ActorProxy
from ray.exceptions import RayActorError

from tqppo.errors import DataError, DeadlineExceeded, EngineError, WorkerError
from tqppo.processes.ray_calls import Settled, call, close_all, kill, num_nodes, results, settle

pytestmark = pytest.mark.usefixtures("local_ray")


@ray.remote(num_cpus=0)
class Echo:
    def say(self, value: int) -> int:
        return value

    def refuse(self) -> int:
        raise DataError("row 3 has no answer")

    def break_down(self) -> int:
        return 1 // 0

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return 0

    def end(self) -> int:
        os._exit(1)


def test_results_come_in_the_order_of_the_calls() -> None:
    echoes = [Echo.remote() for _ in range(3)]
    assert results([echo.say.remote(i) for i, echo in enumerate(echoes)], 60, "the echoes") == [0, 1, 2]
    assert results([], 60, "nothing") == []


def test_an_error_of_ours_is_raised_as_it_was_and_does_not_wait_for_slow_calls() -> None:
    slow, refusing = Echo.remote(), Echo.remote()
    ray.get([slow.say.remote(1), refusing.say.remote(1)])
    began = time.monotonic()
    with pytest.raises(DataError, match=r"^row 3 has no answer$"):
        results([slow.sleep.remote(30), refusing.refuse.remote()], 60, "the echoes")
    assert time.monotonic() - began < 20
    ray.kill(slow)


def test_other_errors_keep_the_remote_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="break_down"):
        results([Echo.remote().break_down.remote()], 60, "the echo")


@pytest.mark.parametrize("died", [WorkerError, EngineError])
def test_a_dead_process_is_named_with_the_error_the_caller_chose(died: type[WorkerError] | type[EngineError]) -> None:
    with pytest.raises(died, match="the echo: the process died"):
        results([Echo.remote().end.remote()], 60, "the echo", died=died)


def test_the_deadline_says_what_is_missing() -> None:
    slow = Echo.remote()
    ray.get(slow.say.remote(1))
    with pytest.raises(DeadlineExceeded, match=r"^the echo did not finish within 0.2 s. 1 answer is missing$"):
        results([slow.sleep.remote(30)], 0.2, "the echo", missing=lambda: "1 answer is missing")
    ray.kill(slow)


def test_settle_reports_every_failure_within_the_grace_period_and_the_calls_without_a_result() -> None:
    echoes = [Echo.remote() for _ in range(3)]
    ray.get([echo.say.remote(1) for echo in echoes])
    calls = [echoes[0].break_down.remote(), echoes[1].sleep.remote(30), echoes[2].refuse.remote()]
    settled = settle(calls, 60, grace_s=3.0)
    assert set(settled.failures) == {0, 2}
    assert settled.pending == (1,)
    ray.kill(echoes[1])


def test_nothing_failed_or_is_pending_once_every_call_has_a_result() -> None:
    assert settle([Echo.remote().say.remote(1)], 60) == Settled()


def test_closing_ends_every_process_also_one_that_does_not_close_in_time() -> None:
    quick, slow = ray.remote(Closable).remote(0.0), ray.remote(Closable).remote(30.0)
    ray.get([quick.ready.remote(), slow.ready.remote()])
    close_all([quick, slow], Closable.close, timeout_s=1.0)
    assert all(is_gone(actor) for actor in (quick, slow))


def is_gone(actor: Any, timeout_s: float = 30.0) -> bool:
    """A killed actor may answer for a moment."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get(actor.ready.remote(), timeout=timeout_s)
        except RayActorError:
            return True
        time.sleep(0.05)
    return False


class Closable:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ready(self) -> None: ...

    def close(self) -> None:
        time.sleep(self.seconds)


class Doubler:
    def double(self, value: int, *, plus: int = 0) -> int:
        return 2 * value + plus

    async def later(self, value: int) -> int:
        return 2 * value


def double_until_it_fails(doubler: ActorProxy[Doubler]) -> None:
    """Ray kills in the background, so that calls shortly after `kill` may still be answered."""
    for _ in range(1000):
        results([call(doubler, Doubler.double, 3)], 60, "the doubler")


def test_methods_are_called_by_the_function_itself() -> None:
    doubler = ray.remote(Doubler).options(num_cpus=0).remote()
    calls = [call(doubler, Doubler.double, 3, plus=1), call(doubler, Doubler.later, 4)]
    assert results(calls, 60, "the doubler") == [7, 8]
    kill(doubler)
    kill(doubler)
    with pytest.raises(WorkerError, match="the process died"):
        double_until_it_fails(doubler)


def test_a_private_ray_has_one_node() -> None:
    assert num_nodes() == 1
