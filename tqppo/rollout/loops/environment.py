"""The agent loop that plays in a text environment: what the model says is an action, the observation follows it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from tqppo.builtin import check_agent_arguments
from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.rollout.chat import Conversation
from tqppo.rollout.environments import Environment, Observation, Step, find_environment
from tqppo.rollout.loops.base import AgentLoop
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate
from tqppo.rollout.trajectory import Trajectory

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class EnvironmentLoop(AgentLoop):
    """Plays an episode per session. `rollout.agent_args` are its fields.

    The session's reward is the sum of its steps' rewards, which are its turns' rewards too. Environments run in this
    process: a step that is late fails its session, and what it computes cannot be ended.
    """

    environment: str  # `module:Class`, `file.py:Class` or `skyrl:NAME`
    args: Mapping[str, object] = field(default_factory=dict)  # of its constructor
    max_turns: int = 8
    timeout_s: float = 60.0  # of one step, and of `reset`
    workers: int = 16  # steps at a time, per engine replica
    role: str = "user"  # of observations that are texts
    template_args: Mapping[str, object] = field(default_factory=dict)  # of the chat template, such as enable_thinking

    @classmethod
    def check(cls, args: Mapping[str, object]) -> None:
        """Check ranges, and import the environment."""
        check_agent_arguments("environment", args)
        find_environment(str(args["environment"]))

    async def start(self, chat: ChatTemplate) -> None:
        self.chat = chat.with_options(self.template_args)
        self.make = find_environment(self.environment)
        self.threads = ThreadPoolExecutor(self.workers, thread_name_prefix="environments")

    async def close(self) -> None:
        if hasattr(self, "threads"):
            self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        environment = self.make(**self.args)
        try:
            return await self._play(environment, prompt, llm)
        finally:
            await self._within_time(environment.close)

    async def _play(self, environment: Environment, prompt: Prompt, llm: Session) -> list[Trajectory]:
        talk, state = self._begin(await self._within_time(environment.reset, prompt), prompt)
        steps: list[Step] = []
        states: list[str] = []
        is_full = False
        for turn in range(self.max_turns):
            context = talk.context()
            is_full = turn > 0 and not llm.room(len(context))
            if is_full:
                break
            completion = await llm.generate(context)
            talk.add_completion(completion)
            states.append(state)
            steps.append(Step.of(await self._within_time(environment.step, talk.text_of(completion))))
            if steps[-1].done or completion.finish_reason != "stop":
                break
            messages = self._messages(steps[-1].observation)
            state = _text(messages)
            talk.add_messages(messages)
        llm.count("agent/forks", talk.num_forks)
        return credited(talk.trajectories(), steps, states, is_full=is_full)

    def _begin(self, observation: Observation, prompt: Prompt) -> tuple[Conversation, str]:
        """The conversation before the first turn, and the name of its state."""
        messages = [] if observation == prompt.messages else self._messages(observation)
        if not messages:
            return Conversation.of(prompt, self.chat), prompt.text
        return Conversation(self.chat, messages), _text(messages)

    def _messages(self, observation: Observation) -> list[Message]:
        """An observation as messages; special tokens in its texts are made harmless."""
        if isinstance(observation, str):
            observation = [{"role": self.role, "content": observation}] if observation else []
        return [{**message, "content": self.chat.defused(str(message["content"]))} for message in observation]

    async def _within_time(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the environment: a coroutine here, another one in a thread."""
        try:
            async with asyncio.timeout(self.timeout_s):
                if inspect.iscoroutinefunction(method):
                    return await method(*args, **kwargs)  # type: ignore[no-any-return]
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self.threads, lambda: method(*args, **kwargs))
        except TimeoutError:
            what = f"{self.environment}: {getattr(method, '__name__', 'a call')}"
            raise TimeoutError(f"{what} took longer than {self.timeout_s:g} s") from None


def credited(
    trajectories: Sequence[Trajectory], steps: Sequence[Step], states: Sequence[str], *, is_full: bool
) -> list[Trajectory]:
    """The trajectories with what their turns earned. The session's reward, the sum, belongs to the last one."""
    found, begin = [], 0
    for each in trajectories:
        end = begin + each.num_turns
        turns = tuple(step.reward for step in steps[begin:end])
        found.append(replace(each, turn_rewards=turns, anchors=tuple(states[begin:end])))
        begin = end
    last = found[-1]
    found[-1] = replace(
        last,
        reward=sum(step.reward for step in steps),
        metrics={**steps[-1].metrics, "is_done": float(steps[-1].done)},
        finish="length" if is_full else last.finish,
    )
    return found


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in messages)
