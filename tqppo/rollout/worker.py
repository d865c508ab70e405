"""The rollout worker: agent loops and the engine replica they talk to, in one process. `pool` runs it as a Ray actor.

Finished groups go straight from here into the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import ray

from tqppo import plugins
from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError
from tqppo.processes.ray_calls import this_node
from tqppo.protocols import EngineSpec, RolloutEngine, WeightSource
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.chunks import ChunkWriter
from tqppo.rollout.loops.base import AgentLoop, RunsSessions, Session, Trajectory, load_loop
from tqppo.rollout.session import SessionRecord
from tqppo.rollout.slots import SessionSlots, all_or_none
from tqppo.rollout.teachers.client import TeacherClient, TeacherRoutes
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.teachers.privileged import own_prompt
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.turns import check_turns
from tqppo.rollout.writer import GroupWriter, Outcome
from tqppo.weights.copy import Copies
from tqppo.weights.send import meeting_place
from tqppo.weights.verify import Probe, verify_logprobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How to make a rollout worker; plain values, no config."""

    backend: str
    engine: EngineSpec
    tokenizer: str
    reward: ScorerSpec
    agent: str = "single_turn"
    agent_args: Mapping[str, object] = field(default_factory=dict)
    max_trajectories: int = 1
    session_retries: int = 0
    max_sessions: int = 0  # played at a time; 0: all
    trust_remote_code: bool = False
    weight_sync: str = "auto"
    chat_template: bool = True  # whether prompts are rendered as chats


async def _result(work: Coroutine[None, None, T]) -> T | Exception:
    """The result, or the error that fails the session. Errors of engine or dataset end the run, so they are raised."""
    try:
        return await work
    except (EngineError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 - a user's loop or reward can raise anything; it fails its session
        return error


class RolloutWorker:
    """Runs sessions on one engine. The constructor starts nothing."""

    def __init__(self, spec: RolloutSpec, queue: Queue) -> None:
        self.spec = spec
        self.queue = queue
        engine = replace(spec.engine, interface=meeting_place()[1])
        self.engine: RolloutEngine = plugins.load("rollout", spec.backend)(engine)
        self.copies = Copies()
        self.loop: RunsSessions = load_loop(spec.agent, spec.agent_args)
        self.scorer: Scorer | None = None
        self.teachers: TeacherClient | None = None

    async def start(self) -> str:
        """Load the tokenizer, start the reward function and the engine; returns Ray's id of this node."""
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code)
        self.chat = ChatTemplate(cast(Tokenizer, loaded))
        self.scorer = Scorer(self.spec.reward)
        if isinstance(self.loop, AgentLoop):
            await self.loop.start(self.chat)
        await self.engine.start()
        return this_node() if ray.is_initialized() else ""

    async def use_teachers(self, routes: TeacherRoutes, place: int) -> None:
        """Have rows scored from now on. `place` is this worker's number."""
        self.teachers = TeacherClient(routes, place)

    async def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        """Sample every session of these (order, prompt) pairs; returns when all groups are in the queue, and scored.

        When a session ends the run, or the call is cancelled, the other sessions are cancelled with their requests.
        """
        names = [task.session_name(prompt.uid, i) for _, prompt in prompts for i in range(task.num_sessions)]
        slots = SessionSlots(self.engine, names, batch=task.batch, limit=self.spec.max_sessions)
        writer = self._writer([prompt for _, prompt in prompts], task)
        await all_or_none(self._group(order, prompt, task, writer, slots) for order, prompt in prompts)
        await writer.finish()
        return RolloutReport() if self.teachers is None else self.teachers.take_report()

    def _writer(self, prompts: Sequence[Prompt], task: Assignment) -> GroupWriter | ChunkWriter:
        if self.teachers is None:
            return GroupWriter(self.queue, task)
        chat, is_chat = self.chat, self.spec.chat_template
        return ChunkWriter(
            self.queue,
            task,
            prompts,
            self.teachers,
            own_prompt=lambda template, prompt: own_prompt(template, prompt, chat, is_chat=is_chat),
            student_logprobs=self._logprobs,
        )

    async def _logprobs(self, tokens: list[list[int]], starts: list[int]) -> list[np.ndarray]:
        """The student's log-probabilities of the tokens after `starts`, at temperature 1."""
        scores = await self.engine.score_many(tokens, starts=starts)
        return [each.logprobs[start:-1] for each, start in zip(scores, starts, strict=True)]

    async def _group(
        self, order: int, prompt: Prompt, task: Assignment, writer: GroupWriter | ChunkWriter, slots: SessionSlots
    ) -> None:
        """Run all sessions of one prompt. A session that fails for good marks its group as failed."""
        sessions = range(task.num_sessions)
        ended = await all_or_none(self._session(order, prompt, index, task, slots) for index in sessions)
        finished = [outcome for outcome, _ in ended if isinstance(outcome, Outcome)]
        errors = [outcome for outcome, _ in ended if isinstance(outcome, Exception)]
        await writer.add(order, prompt, finished, errors, retries=sum(retries for _, retries in ended))

    async def _session(
        self, order: int, prompt: Prompt, index: int, task: Assignment, slots: SessionSlots
    ) -> tuple[Outcome | Exception, int]:
        """Play one session; returns its outcome or error, and the number of retries. An engine's error is raised.

        A retry has the seeds of the first attempt: after a failure that passes, such as a tool server's, the session
        is the one that it would have been, and no answer that makes a tool fail is replaced by a luckier one.
        """
        llm = self._new_session(order, prompt, index, task)
        retries = 0
        async with slots.playing(llm.name):
            played = await _result(self._play(prompt, llm))
            while isinstance(played, Exception) and retries < self.spec.session_retries:
                retries += 1
                llm = replace(llm, turn=0, attempt=retries, record=SessionRecord())
                played = await _result(self._play(prompt, llm))
        if isinstance(played, Exception):
            return played, retries
        outcome = await _result(self._score(prompt, index, played))
        if isinstance(outcome, Outcome):
            outcome = replace(outcome, counts=llm.totals(played))
        return outcome, retries

    def _new_session(self, order: int, prompt: Prompt, index: int, task: Assignment) -> Session:
        is_greedy = index == task.group_size
        return Session(
            self.engine,
            replace(task.sampling, temperature=0.0, top_p=1.0, top_k=0) if is_greedy else task.sampling,
            seed_parts=task.session_parts(prompt.uid, index),
            order=(order, index),
            chat_template=self.chat,
            max_context_tokens=self.spec.engine.max_context_tokens,
        )

    async def _play(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        try:
            return await self.loop.run(prompt, llm)
        except asyncio.CancelledError:
            llm.record.is_cancelled = True
            raise

    async def _score(self, prompt: Prompt, index: int, trajectories: list[Trajectory]) -> Outcome:
        if not trajectories:
            return Outcome(index, [], 0.0, "", {})
        if len(trajectories) > self.spec.max_trajectories:
            raise ValueError(
                f"the agent loop returned {len(trajectories)} trajectories for prompt {prompt.uid}, "
                f"session {index}; rollout.max_trajectories is {self.spec.max_trajectories}. A chat template that "
                "rewrites earlier turns makes one more per turn: `tqppo template check` shows it"
            )
        for trajectory in trajectories:
            check_turns(trajectory)
        last = trajectories[-1]
        text = last.answer
        if text is None:
            text = self.chat.decode(last.response_tokens, special=False)
        if last.reward is not None:
            return Outcome(index, trajectories, last.reward, text, {})
        assert self.scorer is not None, "start() comes first"
        whole = [*last.prompt_tokens, *last.response_tokens] if self.scorer.wants_transcript else []
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

    async def sleep(self) -> None:
        """Leave the devices to the trainer."""
        await self.engine.sleep()

    async def wake(self, *, cache: bool) -> None:
        await self.engine.wake(cache=cache)

    async def held_bytes(self) -> int | None:
        return self.engine.held_bytes()

    async def load_weights(self, source: WeightSource) -> None:
        """Load new weights into the engine."""
        broadcasts = self.engine.capabilities.broadcast and self.spec.weight_sync != "file"
        if source.sender is not None and not broadcasts:
            source = await self.copies.fetch(source, source.sender)
        await self.engine.load_weights(source)

    async def verify(self, probe: Probe) -> float:
        """Check that the engine computes what the trainer computes; returns the largest difference."""
        return await verify_logprobs(self.engine, probe)

    async def close(self) -> None:
        try:
            await self.engine.close()
        finally:
            self.copies.close()
            if isinstance(self.loop, AgentLoop):
                await self.loop.close()
            if self.scorer is not None:
                self.scorer.close()
