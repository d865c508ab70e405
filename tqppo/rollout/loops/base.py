"""What an agent loop is: a class whose coroutine turns one prompt into the trajectories of one session.

A loop sees tokens only through `llm` and never tokenises a turn again: training uses exactly the tokens that the engine
sampled. The rollout worker loads loops by name, the user's own as `module:Class` or `file.py:Class`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from tqppo import plugins
from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate
from tqppo.rollout.trajectory import Trajectory

__all__ = ["AgentLoop", "RunsSessions", "Session", "Trajectory", "check_loop", "load_loop"]

BUILT_IN = {
    "single_turn": "tqppo.rollout.loops.single_turn:SingleTurn",
    "tools": "tqppo.rollout.loops.tools:ToolLoop",
    "rewrite": "tqppo.rollout.loops.rewrite:RewriteLoop",
    "environment": "tqppo.rollout.loops.environment:EnvironmentLoop",
}


@runtime_checkable
class RunsSessions(Protocol):
    """The least that a loop has. A class with nothing but `run` is a loop too."""

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]: ...


class AgentLoop:
    """Base class of agent loops; `rollout.agent_args` are the arguments of its constructor.

    One object serves all sessions of a worker, many at a time, so what belongs to one session stays in local variables
    of `run`. A loop of two turns:

        class AskTwice(AgentLoop):
            def __init__(self, question: str = "Are you sure?") -> None:
                self.question = question

            async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
                talk = Conversation.of(prompt, llm.chat)
                talk.add_completion(await llm.generate(talk.context()))
                talk.add_messages([{"role": "user", "content": self.question}])
                talk.add_completion(await llm.generate(talk.context()))
                return talk.trajectories()

    An exception fails the session; `rollout.on_incomplete_group` says what becomes of its group. When the run ends
    early the coroutine is cancelled: release what a session holds in `finally`.
    """

    @classmethod
    def check(cls, args: Mapping[str, object]) -> None:
        """Raise ConfigError for arguments that cannot work. Called by `validate-config --probe`, and before a run."""

    async def start(self, chat: ChatTemplate) -> None:
        """Start what the sessions share. Called once per worker, before the first session."""

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        """Play one session; return its trajectories in order. The reward function scores the last one."""
        raise NotImplementedError(f"{type(self).__name__} has no `run`")

    async def close(self) -> None:
        """End what `start` began, whatever happened before."""


def check_loop(name: str, args: Mapping[str, object]) -> None:
    """Raise ConfigError if there is no loop called `name`, or if it does not take these arguments."""
    loop_class = _loop_class(name)
    try:
        inspect.signature(loop_class).bind(**args)
    except TypeError as error:
        raise ConfigError(f"rollout.agent_args do not fit the agent loop {name!r}: {error}") from None
    if issubclass(loop_class, AgentLoop):
        loop_class.check(args)


def load_loop(name: str, args: Mapping[str, object]) -> RunsSessions:
    """Make the loop called `name`: a built-in one, or the user's own as `module:Class` or `file.py:Class`."""
    check_loop(name, args)
    loop: RunsSessions = _loop_class(name)(**args)
    return loop


def _loop_class(name: str) -> type:
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.rpartition(":")
    if not module_name or not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"rollout.agent {name!r} is neither built in ({known}) nor `module:Class` or `file.py:Class`")
    try:
        found = plugins.import_own(path)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"rollout.agent {name!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"rollout.agent {name!r}: {module_name} has no class {class_name!r}")
    if not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigError(f"rollout.agent {name!r}: {class_name} has no method `async run(prompt, llm)`")
    return found
