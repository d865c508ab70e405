"""Agent loops: coroutines that turn one prompt into the trajectories of one session. Used by the rollout worker.

A loop sees tokens only through `llm`, and never re-tokenises a turn: what the engine sampled is what is trained on.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError
from tqppo.protocols import Completion, FinishReason, Request, RolloutEngine, Sampling


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One (prompt tokens, response tokens) sequence; the mask is True on tokens that the model sampled."""

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    response_mask: Sequence[bool]
    logprobs: Sequence[float]
    finish: FinishReason
    weight_version: int
    num_turns: int = 1


@dataclass(slots=True)
class Session:
    """The language model as one session sees it: sampling fixed, seeds counted by turn."""

    engine: RolloutEngine
    sampling: Sampling
    seed_parts: tuple[int | str, ...]  # run seed, step, uid, session
    order: tuple[int, ...]
    turn: int = 0

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int = 0) -> Completion:
        """Continue these tokens. A smaller `max_new_tokens` than the config's may be asked for."""
        limit = min(max_new_tokens or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        request = Request(
            tokens=tokens,
            sampling=self.sampling if limit == self.sampling.max_new_tokens else self._shorter(limit),
            seed=counter_seed(*self.seed_parts, self.turn),
            request_id="-".join(map(str, (*self.seed_parts, self.turn))),
            order=(*self.order, self.turn),
        )
        self.turn += 1
        return await self.engine.generate(request)

    def _shorter(self, limit: int) -> Sampling:
        return replace(self.sampling, max_new_tokens=limit)


class AgentLoop(Protocol):
    """One session. Returns its trajectories in order; the last one is what the reward is about."""

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]: ...


class SingleTurn:
    """The prompt, one answer."""

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        completion = await llm.generate(prompt.tokens)
        return [
            Trajectory(
                prompt_tokens=prompt.tokens,
                response_tokens=completion.tokens,
                response_mask=[True] * len(completion.tokens),
                logprobs=completion.logprobs,
                finish=completion.finish_reason,
                weight_version=completion.weight_version,
            )
        ]


BUILT_IN: dict[str, type] = {"single_turn": SingleTurn}


def load_loop(name: str, args: dict[str, Any]) -> AgentLoop:
    """A built-in loop, or the user's own as `module:Class` or `file.py:Class`."""
    if name in BUILT_IN:
        return BUILT_IN[name](**args)
    module_name, _, class_name = name.partition(":")
    if not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"rollout.agent {name!r} is neither built in ({known}) nor `module:Class` or `file.py:Class`")
    return getattr(_import(module_name), class_name)(**args)


def _import(name: str) -> Any:
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
