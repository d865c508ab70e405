from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest

from tqppo.protocols import Completion, Request, RolloutEngine, Sampling
from tqppo.rollout.session import ContextFull, Session, counter_seed
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.trajectory import Trajectory
from tqppo.tiny.tokenizer import byte_tokenizer


class RecordingEngine:
    """Answers each request with two tokens that tell the turn."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        turn = len(self.requests)
        return Completion([10 * turn, 10 * turn + 1], [-0.5, -0.5], "stop", 3)


def session(engine: RecordingEngine, **more: int) -> Session:
    chat = ChatTemplate(cast(Tokenizer, byte_tokenizer()))
    sampling = Sampling(max_new_tokens=8)
    return Session(cast(RolloutEngine, engine), sampling, (1, "train", 2, "p0", 0), (4, 0), chat, **more)


def trajectory(tokens: list[int], mask: list[bool]) -> Trajectory:
    return Trajectory([1], tokens, mask, [-0.5] * len(tokens), "stop", 3)


def test_each_turn_has_its_own_seed_id_and_place_in_the_order() -> None:
    engine = RecordingEngine()
    llm = session(engine)

    async def three_turns() -> None:
        await llm.generate([1])
        await llm.generate([1, 5], max_new_tokens=3)
        await llm.generate([1, 5], max_new_tokens=100)

    asyncio.run(three_turns())
    seeds = [counter_seed(1, "train", 2, "p0", 0, turn) for turn in range(3)]
    assert [request.seed for request in engine.requests] == seeds
    assert [request.request_id for request in engine.requests] == [f"1-train-2-p0-0-{turn}" for turn in range(3)]
    assert [request.order for request in engine.requests] == [(4, 0, 0), (4, 0, 1), (4, 0, 2)]
    assert [request.sampling.max_new_tokens for request in engine.requests] == [8, 3, 8]


def test_a_turn_ends_where_the_context_does() -> None:
    engine = RecordingEngine()
    llm = session(engine, max_context_tokens=10)
    assert (llm.room(1), llm.room(7), llm.room(12)) == (8, 3, 0)
    asyncio.run(llm.generate([1] * 7))
    assert engine.requests[0].sampling.max_new_tokens == 3
    with pytest.raises(ContextFull, match="10 tokens fill the context: the limit is 10"):
        asyncio.run(llm.generate([1] * 10))


def test_a_child_has_seeds_of_its_own_that_depend_on_its_name_only() -> None:
    async def play(names: list[str]) -> dict[str, int]:
        engine = RecordingEngine()
        llm = session(engine)
        for name in names:
            await llm.child(name).generate([1])
        assert len({request.order for request in engine.requests}) == len(names)
        return {request.request_id: request.seed for request in engine.requests}

    assert asyncio.run(play(["left", "right"])) == asyncio.run(play(["right", "left"]))
    assert len(set(asyncio.run(play(["left", "right"])).values())) == 2


def test_two_children_of_one_name_are_an_error() -> None:
    llm = session(RecordingEngine())
    llm.child("left").child("deep")
    llm.child("right").child("deep")
    with pytest.raises(ValueError, match="already has a child called 'left'"):
        llm.child("left")


def test_counters_of_children_belong_to_their_session() -> None:
    llm = session(RecordingEngine())
    llm.count("tool/search/calls")
    llm.child("left").count("tool/search/calls", 2)
    assert llm.totals([]) == {"tool/search/calls": 3.0}


def test_log_lines_begin_with_prompt_and_session(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tqppo.rollout.session"):
        session(RecordingEngine()).child("left").log.info("looked up %d pages", 3)
    assert caplog.messages == ["p0/0/left: looked up 3 pages"]


@pytest.mark.parametrize(
    ("tokens", "mask", "unknown"),
    [
        ([10, 11, 7, 20, 21], [True, True, False, True, True], 0),
        ([10, 11, 20, 21], [True] * 4, 0),  # two turns without an observation between them
        ([10, 11, 7, 20], [True, True, False, True], 0),  # the last turn was cut
        ([7, 8], [False, False], 0),
        ([10, 12, 7, 20, 21], [True, True, False, True, True], 2),
        ([10, 11, 7, 20, 21], [True] * 5, 1),  # an observation that would be trained on
    ],
)
def test_masked_tokens_that_were_not_sampled_are_counted(tokens: list[int], mask: list[bool], unknown: int) -> None:
    llm = session(RecordingEngine())

    async def two_turns() -> None:
        await llm.generate([1])
        await llm.generate([1])

    asyncio.run(two_turns())
    assert llm.num_retokenized([trajectory(tokens, mask)]) == unknown
    assert llm.totals([trajectory(tokens, mask)]) == ({"agent/retokenized_tokens": unknown} if unknown else {})


def test_a_turn_that_begins_like_another_is_still_known() -> None:
    llm = session(RecordingEngine())
    llm.record.completions = [Completion(turn, [0.0] * len(turn), "stop", 0) for turn in ([1, 2, 3], [1, 2], [3, 9])]
    assert llm.num_retokenized([trajectory([1, 2, 3, 9], [True] * 4)]) == 0


def test_counter_seeds_are_63_bits_and_the_same_in_every_process() -> None:
    assert counter_seed(0, "train", 1, "p0", 0, 0) == 4_969_882_496_229_581_945
    assert all(0 <= counter_seed(i) < 2**63 for i in range(100))
