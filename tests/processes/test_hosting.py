"""Objects in processes, called by method: what holds for Ray actors and for objects of this process alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tqppo.devices.seats import NO_CPU
from tqppo.errors import DataError, DeadlineExceeded, WorkerError
from tqppo.processes.hosting import (
    Call,
    Hosting,
    Launcher,
    Process,
    Settled,
    close_all,
    described,
    first_ended,
    results,
    settle,
)
from tqppo.processes.job import run_job
from tqppo.processes.local import LocalLauncher
from tqppo.processes.ray_launcher import RayLauncher

HERE = Hosting(NO_CPU)


class Echo:
    def __init__(self) -> None:
        self.is_closed = False

    def say(self, value: int, *, plus: int = 0) -> int:
        return value + plus

    async def later(self, value: int) -> int:
        return value

    async def sleep(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 0

    def refuse(self) -> int:
        raise DataError("row 3 has no answer")

    def break_down(self) -> int:
        return 1 // 0

    async def close(self) -> None:
        self.is_closed = True


def doubled(value: int) -> int:
    return 2 * value


class Napper:
    async def close(self) -> None:
        await asyncio.sleep(30)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
        yield RayLauncher()
        return
    local = LocalLauncher()
    yield local
    local.close()


@pytest.fixture
def echo(launcher: Launcher) -> Iterator[Process[Echo]]:
    made = launcher.launch(Hosting(NO_CPU, concurrency=10), Echo)
    yield made
    made.kill()


def is_gone(process: Process[Echo], timeout_s: float = 30.0) -> bool:
    """A process that Ray kills may answer for a moment."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            results([process.call(Echo.say, 1)], timeout_s, "the echo")
        except WorkerError as error:
            return "the echo: the process died" in str(error)
    return False


def test_plain_methods_and_coroutines_are_called_by_the_function_itself(echo: Process[Echo]) -> None:
    calls = [echo.call(Echo.say, 3, plus=1), echo.call(Echo.later, 8)]
    assert results(calls, 60, "the echo") == [4, 8]
    assert settle(calls, 60) == Settled()
    assert results([], 60, "nothing") == []


def test_a_call_is_an_argument_of_another_and_can_be_awaited(echo: Process[Echo]) -> None:
    first: Call[int] = echo.call(Echo.say, 5)

    async def awaited() -> int:
        return await echo.call(Echo.say, first, plus=2)  # type: ignore[arg-type]

    assert asyncio.run(awaited()) == 7


def test_an_error_of_ours_is_raised_as_it_was_and_does_not_wait_for_slow_calls(echo: Process[Echo]) -> None:
    slow = echo.call(Echo.sleep, 30.0)
    with pytest.raises(DataError, match=r"^row 3 has no answer$"):
        results([slow, echo.call(Echo.refuse)], 20, "the echo")
    slow.cancel()


def test_other_errors_keep_their_type_and_traceback(echo: Process[Echo]) -> None:
    failing = echo.call(Echo.break_down)
    settled = settle([failing], 60)
    assert "1 // 0" in described(settled.failures[0])
    with pytest.raises(ZeroDivisionError):
        results([failing], 60, "the echo")


def test_a_deadline_says_what_is_missing(echo: Process[Echo]) -> None:
    slow = echo.call(Echo.sleep, 30.0)
    assert first_ended([slow], 0.1) == []
    with pytest.raises(DeadlineExceeded, match=r"^the echo did not finish within 0.2 s. 1 answer is missing$"):
        results([slow], 0.2, "the echo", missing=lambda: "1 answer is missing")
    slow.cancel()


def test_closing_ends_every_process_also_one_that_does_not_close_in_time(launcher: Launcher) -> None:
    quick, slow = launcher.launch(HERE, Echo), launcher.launch(HERE, Napper)
    assert results([quick.call(Echo.say, 1)], 60, "the echo") == [1]
    began = time.monotonic()
    close_all([slow], Napper.close, timeout_s=0.5)
    assert time.monotonic() - began < 20
    close_all([quick], Echo.close, timeout_s=60)
    assert is_gone(quick)


def test_a_function_runs_in_a_process_of_its_own(launcher: Launcher) -> None:
    assert run_job(launcher, HERE, 60, "doubling", partial(doubled, 7)) == 14
