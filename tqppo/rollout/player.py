"""Plays the sessions of one call of `generate`: runs the agent loop, tries again what failed, scores the answers.

The rollout worker makes one player per call. It is a class of its own because Ray wraps every method of an actor's
class, and a session makes many calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError
from tqppo.protocols import RolloutEngine, Sampling
from tqppo.rewards.scorer import Scorer, unusable
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.loops.base import RunsSessions
from tqppo.rollout.session import Session, SessionRecord
from tqppo.rollout.slots import SessionSlots, all_or_none
from tqppo.rollout.template import ChatTemplate
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.turns import check_turns
from tqppo.rollout.writer import Outcome

T = TypeVar("T")


class TakesGroups(Protocol):
    """Puts groups whose sessions have all ended into the queue."""

    async def add(
        self,
        order: int,
        prompt: Prompt,
        outcomes: Sequence[Outcome],
        errors: Sequence[BaseException],
        *,
        retries: int = 0,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds on what sessions may do; see the config's `[rollout]`."""

    max_context_tokens: int
    max_trajectories: int = 1
    retries: int = 0
    max_sessions: int = 0  # played at a time; 0: all


async def _result(work: Coroutine[None, None, T]) -> T | Exception:
    """The result, or the error that fails the session. Errors of engine or dataset end the run, so they are raised."""
    try:
        return await work
    except (EngineError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 - a user's loop or reward can raise anything; it fails its session
        return error


def check_own_rewards(trajectory: Trajectory, what: str) -> None:
    """Raise ValueError if the loop gave the trajectory, or a turn of it, a reward that cannot be trained on."""
    for place, reward in enumerate([trajectory.reward, *trajectory.turn_rewards]):
        if reward is not None and (problem := unusable(reward)) is not None:
            turn = f" of turn {place}" if place else ""
            raise ValueError(f"{what}: the agent loop's reward{turn} {problem}")


class SessionPlayer:
    """Plays sessions on one engine, as one assignment says."""

    def __init__(
        self,
        engine: RolloutEngine,
        loop: RunsSessions,
        chat: ChatTemplate,
        scorer: Scorer,
        limits: SessionLimits,
        task: Assignment,
    ) -> None:
        self.engine, self.loop, self.chat, self.scorer = engine, loop, chat, scorer
        self.limits, self.task = limits, task
        self.wants_transcript = scorer.wants_transcript

    async def play(self, prompts: Sequence[tuple[int, Prompt]], writer: TakesGroups) -> None:
        """Play every session of these (order, prompt) pairs. A group whose sessions have ended goes to the writer."""
        groups = [(order, prompt, self._sessions(order, prompt)) for order, prompt in prompts]
        names = [llm.name for _, _, sessions in groups for llm in sessions]
        slots = SessionSlots(self.engine, names, batch=self.task.batch, limit=self.limits.max_sessions)
        await all_or_none(self._group(order, prompt, sessions, slots, writer) for order, prompt, sessions in groups)

    def _sessions(self, order: int, prompt: Prompt) -> list[Session]:
        return [self._session(order, prompt, index) for index in range(self.task.num_sessions)]

    def _session(self, order: int, prompt: Prompt, index: int) -> Session:
        return Session(
            self.engine,
            self._sampling(is_greedy=index == self.task.group_size),
            seed_parts=self.task.session_parts(prompt.uid, index),
            order=(order, index),
            chat_template=self.chat,
            max_context_tokens=self.limits.max_context_tokens,
        )

    def _sampling(self, *, is_greedy: bool) -> Sampling:
        sampling = self.task.sampling
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=0) if is_greedy else sampling

    async def _group(
        self, order: int, prompt: Prompt, sessions: Sequence[Session], slots: SessionSlots, writer: TakesGroups
    ) -> None:
        """Play all sessions of one prompt. A session that fails for good marks its group as failed."""
        ended = await all_or_none(self._one(prompt, llm, index, slots) for index, llm in enumerate(sessions))
        finished = [outcome for outcome, _ in ended if isinstance(outcome, Outcome)]
        errors = [outcome for outcome, _ in ended if isinstance(outcome, Exception)]
        await writer.add(order, prompt, finished, errors, retries=sum(retries for _, retries in ended))

    async def _one(
        self, prompt: Prompt, llm: Session, index: int, slots: SessionSlots
    ) -> tuple[Outcome | Exception, int]:
        """Play one session; returns its outcome or error, and the number of retries. An engine's error is raised.

        A retry has the seeds of the first attempt: after a failure that passes, such as a tool server's, the session
        is the one that it would have been, and no answer that makes a tool fail is replaced by a luckier one.
        """
        retries = 0
        async with slots.playing(llm.name):
            played = await _result(self._play(prompt, llm))
            while isinstance(played, Exception) and retries < self.limits.retries:
                retries += 1
                llm = replace(llm, turn=0, attempt=retries, record=SessionRecord())
                played = await _result(self._play(prompt, llm))
        if isinstance(played, Exception):
            return played, retries
        outcome = await _result(self._score(prompt, index, played))
        if isinstance(outcome, Outcome):
            outcome.counts = llm.totals(played)
        return outcome, retries

    async def _play(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        try:
            return await self.loop.run(prompt, llm)
        except asyncio.CancelledError:
            llm.record.is_cancelled = True
            raise

    async def _score(self, prompt: Prompt, index: int, trajectories: list[Trajectory]) -> Outcome:
        if not trajectories:
            return Outcome(index, [], 0.0, "", {})
        if len(trajectories) > self.limits.max_trajectories:
            raise ValueError(
                f"the agent loop returned {len(trajectories)} trajectories for prompt {prompt.uid}, "
                f"session {index}; rollout.max_trajectories is {self.limits.max_trajectories}. A chat template that "
                "rewrites earlier turns makes one more per turn: `tqppo template check` shows it"
            )
        for number, trajectory in enumerate(trajectories):
            check_turns(trajectory)
            check_own_rewards(trajectory, f"prompt {prompt.uid}, session {index}, trajectory {number}")
        last = trajectories[-1]
        text = last.answer
        if text is None:
            text = self.chat.decode(last.response_tokens, special=False)
        if last.reward is not None:
            return Outcome(index, trajectories, last.reward, text, {})
        whole = [*last.prompt_tokens, *last.response_tokens] if self.wants_transcript else []
        reward = await self.scorer.score(
            prompt.source,
            text,
            prompt.answer,
            prompt.extra,
            prompt=prompt.question,
            transcript=self.chat.decode(whole, special=True) if whole else "",
            response_tokens=len(last.response_tokens),
        )
        answer = text if reward.prediction is None else reward.prediction
        return Outcome(index, trajectories, reward.score, answer, dict(reward.metrics), reward.drop_group)
