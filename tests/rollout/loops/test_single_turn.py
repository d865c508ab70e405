from __future__ import annotations

import asyncio
from typing import cast

from tqppo.data.prompts import Prompt
from tqppo.protocols import Completion, Request, RolloutEngine, Sampling
from tqppo.rollout.loops.base import Session, Trajectory
from tqppo.rollout.loops.single_turn import SingleTurn


class OneAnswer:
    async def generate(self, request: Request) -> Completion:
        return Completion([7, 8], [-0.1, -0.2], "length", 5)


def test_a_session_is_the_prompt_and_one_completion() -> None:
    prompt = Prompt("p0", 0, [1, 2], "a", "sort", {}, "text")
    llm = Session(cast(RolloutEngine, OneAnswer()), Sampling(), (0,), (0,))
    found = asyncio.run(SingleTurn().run(prompt, llm))
    assert found == [Trajectory([1, 2], [7, 8], [True, True], [-0.1, -0.2], "length", 5)]
    assert llm.turn == 1
