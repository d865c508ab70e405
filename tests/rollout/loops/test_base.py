from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tqppo.errors import ConfigError
from tqppo.protocols import Completion, Request, RolloutEngine, Sampling
from tqppo.rollout.loops.base import AgentLoop, Session, counter_seed, load_loop
from tqppo.rollout.loops.single_turn import SingleTurn

OWN_LOOP = """
class Twice:
    def __init__(self, times=2):
        self.times = times

    async def run(self, prompt, llm):
        return []

class NotALoop:
    pass
"""


class RecordingEngine:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return Completion([5], [-0.5], "stop", 3)


def test_each_turn_has_its_own_seed_id_and_place_in_the_order() -> None:
    engine = RecordingEngine()
    session = Session(cast(RolloutEngine, engine), Sampling(max_new_tokens=8), (1, "train", 2, "p0", 0), (4, 0))

    async def two_turns() -> None:
        await session.generate([1])
        await session.generate([1, 5], max_new_tokens=3)
        await session.generate([1, 5], max_new_tokens=100)

    asyncio.run(two_turns())
    assert [request.seed for request in engine.requests] == [
        counter_seed(1, "train", 2, "p0", 0, turn) for turn in range(3)
    ]
    assert [request.request_id for request in engine.requests] == [f"1-train-2-p0-0-{turn}" for turn in range(3)]
    assert [request.order for request in engine.requests] == [(4, 0, 0), (4, 0, 1), (4, 0, 2)]
    assert [request.sampling.max_new_tokens for request in engine.requests] == [8, 3, 8]


def test_built_in_loops_are_known_by_name() -> None:
    assert isinstance(load_loop("single_turn", {}), SingleTurn)


def test_a_user_s_loop_comes_from_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loop_of_test.py").write_text(OWN_LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/own_loop_of_test.py:Twice", "own_loop_of_test:Twice"):
        loop = load_loop(name, {"times": 3})
        assert isinstance(loop, AgentLoop)
        assert vars(loop) == {"times": 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tools", "neither built in"),
        ("module:", "neither built in"),
        ("/nowhere/x.py:Loop", "there is no file /nowhere/x.py"),
        ("{folder}/own.py:NotALoop", "has no method `run"),
    ],
)
def test_names_that_are_no_loop_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP)
    with pytest.raises(ConfigError, match=message):
        load_loop(name.format(folder=tmp_path), {})


def test_counter_seeds_are_63_bits_and_the_same_in_every_process() -> None:
    assert counter_seed(0, "train", 1, "p0", 0, 0) == 4_969_882_496_229_581_945
    assert all(0 <= counter_seed(i) < 2**63 for i in range(100))
