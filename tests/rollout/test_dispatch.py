"""Groups go to replicas in turn or by load, and stay there; a step that fails is cancelled everywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tqppo.devices.seats import NO_CPU
from tqppo.errors import DeadlineExceeded, EngineError
from tqppo.processes.hosting import Hosting, Process, results
from tqppo.processes.local import LocalLauncher
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.rollout.dispatch import Dispatcher


class Replica:
    """Takes as long over an item as the item says, and tells what became of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.most = 0
        self.running: list[float] = []
        self.cancelled: list[float] = []

    async def play(self, items: Sequence[float]) -> list[tuple[int, float]]:
        self.running += items
        self.most = max(self.most, len(self.running))
        try:
            if min(items) < 0:
                raise EngineError("the server is gone")
            await asyncio.gather(*map(asyncio.sleep, items))
        except asyncio.CancelledError:
            self.cancelled += items
            raise
        finally:
            for item in items:
                self.running.remove(item)
        return [(self.number, item) for item in items]

    async def figures(self) -> tuple[int, int, int]:
        return self.most, len(self.running), len(self.cancelled)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def replicas(request: pytest.FixtureRequest) -> Any:
    """In this process, and as Ray actors."""
    if request.param == "ray":
        request.getfixturevalue("local_ray")
        launcher: Any = RayLauncher()
    else:
        launcher = LocalLauncher()
    made = [launcher.launch(Hosting(NO_CPU, concurrency=100), Replica, i) for i in range(2)]
    yield made
    for each in made:
        each.kill()


def figures(replicas: Sequence[Process[Replica]]) -> list[tuple[int, int, int]]:
    return results([each.call(Replica.figures) for each in replicas], 60, "the replicas")


def dispatcher(replicas: Any, room: int, timeout_s: float = 60.0) -> Dispatcher[float, list[tuple[int, float]]]:
    return Dispatcher(
        lambda i, items: replicas[i].call(Replica.play, items), len(replicas), room, timeout_s, lambda: "2 are missing."
    )


def test_without_a_limit_items_go_to_the_replicas_in_turn(replicas: Any) -> None:
    found = sorted(each for part in dispatcher(replicas, 0).run([0.0, 0.1, 0.2]) for each in part)
    assert found == [(0, 0.0), (0, 0.2), (1, 0.1)]


def test_a_replica_with_less_to_do_gets_the_next_item(replicas: Any) -> None:
    """The first replica is busy with a long item, so all further ones go to the second, two at a time."""
    short = [0.01 * i for i in range(8)]
    parts = dispatcher(replicas, 1).run([3.0, *short])
    places = {item: replica for part in parts for replica, item in part}
    assert [places[item] for item in short] == [1 - places[3.0]] * 8


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [([-1.0, 50.0], EngineError, "the server is gone"), ([50.0, 51.0], DeadlineExceeded, "2 are missing")],
)
def test_a_step_that_fails_is_cancelled_on_every_replica(
    replicas: Any, items: list[float], error: type[Exception], message: str
) -> None:
    before = figures(replicas)
    with pytest.raises(error, match=message):
        dispatcher(replicas, 0, timeout_s=3.0).run(items)
    deadline = time.monotonic() + 20
    while any(running for _, running, _ in figures(replicas)):
        assert time.monotonic() < deadline, "the others go on"
        time.sleep(0.05)
    after = figures(replicas)
    assert sum(each[2] for each in after) - sum(each[2] for each in before) == sum(item > 0 for item in items)
