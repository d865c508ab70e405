"""One session as its agent loop sees it: the model, the chat template, a logger, and counters that become metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Any

from tqppo.protocols import Completion, Request, RolloutEngine, Sampling
from tqppo.rollout.assignment import session_name
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)


class ContextFull(Exception):
    """The tokens leave no room for a new one within `rollout.max_context_tokens`."""


@dataclass(slots=True)
class SessionRecord:
    """What a session and its children did, together."""

    completions: list[Completion] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    is_cancelled: bool = False
    children: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Session:
    """The language model as one session sees it, with fixed sampling settings and a new seed for each turn."""

    engine: RolloutEngine
    sampling: Sampling
    seed_parts: tuple[int | str, ...]  # run seed, partition, step, uid, session, names of children
    order: tuple[int, ...]
    chat_template: ChatTemplate | None = None
    max_context_tokens: int = 0  # the longest sequence that the engine takes; 0: unknown
    turn: int = 0
    attempt: int = 0  # retries so far: requests of an attempt that failed may still run, and keep their names
    record: SessionRecord = field(default_factory=SessionRecord)
    name: str = field(init=False)  # the same for all turns and retries; a sub-agent's begins with its parent's

    def __post_init__(self) -> None:
        self.name = session_name(self.seed_parts)

    @property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template; `Conversation.of(prompt, llm.chat)` keeps a session's tokens."""
        assert self.chat_template is not None, "the worker gives every session its chat template"
        return self.chat_template

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines begin with the prompt and the session."""
        return _SessionLog(log, {"session": "/".join(map(str, self.seed_parts[3:]))})

    @property
    def is_cancelled(self) -> bool:
        """Whether the session was ended from outside; for threads that a loop started. Coroutines are cancelled."""
        return self.record.is_cancelled

    def room(self, num_tokens: int) -> int:
        """New tokens that one request may ask for after `num_tokens` tokens; at most `rollout.max_new_tokens`."""
        most = self.sampling.max_new_tokens
        return max(0, min(most, self.max_context_tokens - num_tokens)) if self.max_context_tokens else most

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int = 0) -> Completion:
        """Continue these tokens. `max_new_tokens` lowers the config's limit for this turn and cannot raise it."""
        room = self.room(len(tokens))
        if not room:
            raise ContextFull(f"{len(tokens)} tokens fill the context: the limit is {self.max_context_tokens}")
        limit, sampling = min(max_new_tokens or room, room), self.sampling
        request = Request(
            tokens=tokens,
            sampling=sampling if limit == sampling.max_new_tokens else replace(sampling, max_new_tokens=limit),
            seed=counter_seed(*self.seed_parts, self.turn),
            request_id=self._request_id(),
            order=(*self.order, self.turn),
            session=self.name,
        )
        self.turn += 1
        completion = await self.engine.generate(request)
        self.record.completions.append(completion)
        if completion.reused_tokens and self.turn > 1:
            self.count("agent/reused_tokens", completion.reused_tokens)
        return completion

    def _request_id(self) -> str:
        return f"{self.name}-retry{self.attempt}-{self.turn}" if self.attempt else f"{self.name}-{self.turn}"

    def child(self, name: str) -> Session:
        """A session of a sub-agent, with the same sampling and seeds that follow from its name."""
        path = "/".join(map(str, (*self.seed_parts[5:], name)))
        if path in self.record.children:
            raise ValueError(f"this session already has a child called {path!r}")
        self.record.children.add(path)
        order = (*self.order, counter_seed(name))  # after the parent's turns, and the same whichever child comes first
        return replace(self, seed_parts=(*self.seed_parts, name), order=order, turn=0)

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a metric of the step that is summed over sessions, such as `tool/search/calls`."""
        counts = self.record.counts
        counts[name] = counts.get(name, 0.0) + amount

    def totals(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The session's counters. Those of a loop that behaves and counts nothing are empty."""
        if retokenized := self.num_retokenized(trajectories):
            return {**self.record.counts, "agent/retokenized_tokens": float(retokenized)}
        return self.record.counts

    def num_retokenized(self, trajectories: Sequence[Trajectory]) -> int:
        """Tokens that would be trained on and that the engine did not sample in this session; 0 in a correct loop."""
        sampled = [completion.tokens for completion in self.record.completions]
        changed = [each for each in trajectories if not any(each.response_tokens is turn for turn in sampled)]
        turns = [list(turn) for turn in sampled] if changed else []
        return sum(_num_unknown(run, turns) for each in changed for run in _runs(each))


class _SessionLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{(self.extra or {})['session']}: {msg}", kwargs


def _runs(trajectory: Trajectory) -> Iterator[list[int]]:
    """The masked tokens of a trajectory, as far as they are neighbours."""
    pairs = zip(trajectory.response_tokens, trajectory.response_mask, strict=True)
    for is_sampled, run in groupby(pairs, key=itemgetter(1)):
        if is_sampled:
            yield [token for token, _ in run]


def _num_unknown(run: list[int], turns: Sequence[list[int]]) -> int:
    """Tokens of a run that remain when it is covered with whole turns, of which the last may be cut short."""
    fewest = {0: 0}  # position → unknown tokens before it
    for begin in range(len(run)):
        if begin not in fewest:
            continue
        rest = run[begin:]
        lengths = {min(len(rest), len(turn)) for turn in turns if turn and rest[: len(turn)] == turn[: len(rest)]}
        for length in lengths or {1}:
            unknown = fewest[begin] + (not lengths)
            fewest[begin + length] = min(unknown, fewest.get(begin + length, unknown))
    return fewest[len(run)]


def counter_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of its parts."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
