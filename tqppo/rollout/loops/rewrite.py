"""The agent loop that rewrites its context between turns: earlier turns are left out, or the model summarises them.

What the model has seen before a rewriting ends there as a trajectory; the shorter history is the prompt of the next.
So a session yields one trajectory and one more for each rewriting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqppo.builtin import HowToRewrite, check_agent_arguments
from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.rollout.chat import Conversation
from tqppo.rollout.loops.tools import ToolLoop
from tqppo.rollout.session import Session
from tqppo.rollout.trajectory import Trajectory

QUESTION = "Summarise what you have found so far and what is left to do. The rest of the conversation will be deleted."


@dataclass(eq=False)
class RewriteLoop(ToolLoop):
    """The loop with tools, and a context that stays short. `rollout.agent_args` are its fields."""

    how: HowToRewrite = "truncate"  # leave earlier turns out, or have the model summarise them first
    keep_turns: int = 1  # the last turns with their results, which are kept as they are
    above_tokens: int = 0  # rewrite only contexts that are longer than this
    question: str = QUESTION  # asks the model for its summary

    @classmethod
    def check(cls, args: Mapping[str, object]) -> None:
        """Check the arguments of rewriting, and those of the tools."""
        check_agent_arguments("rewrite", args)
        super().check(args)

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        llm.count("agent/rewrites", 0.0)
        return await super().run(prompt, llm)

    async def before_turn(self, talk: Conversation, llm: Session) -> None:
        """Rewrite the context if it is long enough and there is something to leave out."""
        context = talk.context()
        prompt, turns = split_turns(talk.messages)
        kept = turns[len(turns) - self.keep_turns :] if self.keep_turns else []
        if len(context) <= self.above_tokens or len(kept) >= len(turns):
            return
        if self.how == "summarise":
            summary = await self._summary(talk, llm)
            if summary is None:
                return
            prompt = with_summary(prompt, self.chat.defused(summary))
        talk.restart([*prompt, *(message for turn in kept for message in turn)])
        llm.count("agent/rewrites")

    async def _summary(self, talk: Conversation, llm: Session) -> str | None:
        """What the model says of the conversation so far; None if there is no room to ask it."""
        talk.add_messages([{"role": "user", "content": self.question}])
        context = talk.context()
        if not llm.room(len(context)):
            return None
        completion = await llm.generate(context)
        talk.add_completion(completion)
        return talk.text_of(completion)


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The messages before the assistant first speaks, and its turns, each with the messages that answer it."""
    prompt: list[Message] = []
    turns: list[list[Message]] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append([message])
        else:
            (turns[-1] if turns else prompt).append(message)
    return prompt, turns


def with_summary(prompt: Sequence[Message], summary: str) -> list[Message]:
    """The prompt whose last message is followed by a summary of what the model did."""
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}\n\nWhat you have done so far:\n{summary}"}]
