"""What an agent loop is: a coroutine that turns one prompt into the trajectories of one session.

A loop sees tokens only through `llm` and never re-tokenises a turn: training uses exactly the tokens that the engine
sampled. The rollout worker loads loops by name, the user's own as `module:Class` or `file.py:Class`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError
from tqppo.protocols import Completion, FinishReason, Request, RolloutEngine, Sampling

BUILT_IN = {"single_turn": "tqppo.rollout.loops.single_turn:SingleTurn"}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence of prompt and response tokens. The mask and the log-probabilities have one value per response token;
    the mask is True on tokens that the model sampled."""

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    response_mask: Sequence[bool]
    logprobs: Sequence[float]
    finish: FinishReason
    weight_version: int
    num_turns: int = 1


@dataclass(slots=True)
class Session:
    """The language model as one session sees it, with fixed sampling settings and a new seed for each turn."""

    engine: RolloutEngine
    sampling: Sampling
    seed_parts: tuple[int | str, ...]  # run seed, partition, step, uid, session
    order: tuple[int, ...]
    turn: int = 0

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int = 0) -> Completion:
        """Continue these tokens. `max_new_tokens` lowers the config's limit for this turn and cannot raise it."""
        limit = min(max_new_tokens or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        request = Request(
            tokens=tokens,
            sampling=replace(self.sampling, max_new_tokens=limit),
            seed=counter_seed(*self.seed_parts, self.turn),
            request_id="-".join(map(str, (*self.seed_parts, self.turn))),
            order=(*self.order, self.turn),
        )
        self.turn += 1
        return await self.engine.generate(request)


@runtime_checkable
class AgentLoop(Protocol):
    """Base of agent loops; `rollout.agent_args` are the arguments of its constructor.

    `run` plays one session and returns its trajectories in order. The reward function sees the last one.
    """

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]: ...


def load_loop(name: str, args: Mapping[str, object]) -> AgentLoop:
    """Make the loop called `name`: a built-in one, or the user's own as `module:Class` or `file.py:Class`."""
    module_name, _, class_name = BUILT_IN.get(name, name).rpartition(":")
    if not module_name or not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"rollout.agent {name!r} is neither built in ({known}) nor `module:Class` or `file.py:Class`")
    loop: object = getattr(_import(module_name), class_name)(**args)
    if not isinstance(loop, AgentLoop):
        raise ConfigError(f"rollout.agent {name!r}: {class_name} has no method `run(prompt, llm)`")
    return loop


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ConfigError(f"rollout.agent: there is no file {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counter_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of its parts."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
