"""An engine that says its lines, and sessions that it plays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from tqppo.data.prompts import Prompt
from tqppo.protocols import Completion, Request, RolloutEngine, Sampling
from tqppo.rollout.loops.base import AgentLoop
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.trajectory import Trajectory
from tqppo.tiny.tokenizer import byte_tokenizer

CHAT = ChatTemplate(cast(Tokenizer, byte_tokenizer()))


class ScriptedEngine:
    """Says its lines, one per request, each cut at the request's limit, and keeps what it was asked."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        self.contexts: list[str] = []
        self.seeds: list[int] = []

    async def generate(self, request: Request) -> Completion:
        self.contexts.append(CHAT.decode(request.tokens))
        self.seeds.append(request.seed)
        tokens = CHAT.encode(self.lines.pop(0))
        cut = tokens[: request.sampling.max_new_tokens]
        return Completion(cut, [-0.5] * len(cut), "stop" if len(cut) == len(tokens) else "length", 2)


def prompt_of(question: str, answer: str = "") -> Prompt:
    text = f"<|user|>{question}<|assistant|>"
    return Prompt("p0", 0, CHAT.encode(text), answer, "s", {}, text, [{"role": "user", "content": question}])


def session_on(engine: ScriptedEngine, limit: int = 0) -> Session:
    return Session(cast(RolloutEngine, engine), Sampling(max_new_tokens=64), (0, "p", 1, "p0", 0), (0, 0), CHAT, limit)


def play(loop: AgentLoop, prompt: Prompt, llm: Session) -> list[Trajectory]:
    """One session of a loop, started and closed as the worker does."""

    async def session() -> list[Trajectory]:
        try:
            await loop.start(llm.chat)
            return await loop.run(prompt, llm)
        finally:
            await loop.close()

    return asyncio.run(session())


def text_of(trajectory: Trajectory, *, sampled: bool = True) -> str:
    """The response's tokens that were sampled, or those that were not."""
    pairs = zip(trajectory.response_tokens, trajectory.response_mask, strict=True)
    return CHAT.decode([token for token, mask in pairs if mask == sampled])
