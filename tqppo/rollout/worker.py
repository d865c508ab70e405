"""The rollout worker: agent loops and the engine replica they talk to, in one process. `pool` runs it as a Ray actor.

Finished groups go straight from here into the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import ray

from tqppo import plugins
from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError
from tqppo.protocols import EngineSpec, RolloutEngine, WeightSource
from tqppo.queue.client import Queue
from tqppo.ray_calls import this_node
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.chunks import ChunkWriter
from tqppo.rollout.loops.base import AgentLoop, RunsSessions, Session, Trajectory, load_loop
from tqppo.rollout.teachers.client import TeacherClient, TeacherRoutes
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.teachers.privileged import own_prompt
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.turns import check_turns
from tqppo.rollout.writer import GroupWriter, Outcome
from tqppo.weights.copy import Copies
from tqppo.weights.send import meeting_place
from tqppo.weights.verify import Probe, verify_logprobs


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
    trust_remote_code: bool = False
    weight_sync: str = "auto"
    chat_template: bool = True  # whether prompts are rendered as chats


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
        """Sample every session of these (order, prompt) pairs; returns when all groups are in the queue, and scored."""
        self.engine.expect(len(prompts) * task.num_sessions)
        writer = self._writer([prompt for _, prompt in prompts], task)
        await asyncio.gather(*(self._group(order, prompt, task, writer) for order, prompt in prompts))
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

    async def _group(self, order: int, prompt: Prompt, task: Assignment, writer: GroupWriter | ChunkWriter) -> None:
        """Run all sessions of one prompt. A session that fails for good marks its group as failed.

        A retry has the seeds of the first attempt: after a failure that passes, such as a tool server's, the session
        is the one that it would have been, and no answer that makes a tool fail is replaced by a luckier one.
        """
        outcomes: dict[int, Outcome | BaseException] = {}
        pending, retries = list(range(task.num_sessions)), 0
        for attempt in range(self.spec.session_retries + 1):
            if attempt:
                self.engine.expect(len(pending))
                retries += len(pending)
            outcomes |= await self._attempt(order, prompt, pending, task, attempt)
            pending = [index for index in pending if isinstance(outcomes[index], BaseException)]
            if not pending:
                break
        settled = [outcomes[index] for index in sorted(outcomes)]
        finished = [outcome for outcome in settled if isinstance(outcome, Outcome)]
        errors = [outcome for outcome in settled if isinstance(outcome, BaseException)]
        await writer.add(order, prompt, finished, errors, retries=retries)

    async def _attempt(
        self, order: int, prompt: Prompt, sessions: Sequence[int], task: Assignment, attempt: int
    ) -> dict[int, Outcome | BaseException]:
        """Run these sessions and return what each ended with. A failed engine or dataset ends the run."""
        outcomes = await asyncio.gather(
            *(self._session(order, prompt, index, task, attempt) for index in sessions), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, (EngineError, DataError, asyncio.CancelledError)):
                raise outcome
        return dict(zip(sessions, outcomes, strict=True))

    async def _session(self, order: int, prompt: Prompt, index: int, task: Assignment, attempt: int = 0) -> Outcome:
        is_greedy = index == task.group_size
        llm = Session(
            self.engine,
            replace(task.sampling, temperature=0.0, top_p=1.0, top_k=0) if is_greedy else task.sampling,
            seed_parts=(task.seed, task.partition, task.step, prompt.uid, index),
            order=(order, index),
            chat_template=self.chat,
            max_context_tokens=self.spec.engine.max_context_tokens,
            attempt=attempt,
        )
        try:
            trajectories = await self.loop.run(prompt, llm)
        except asyncio.CancelledError:
            llm.record.is_cancelled = True
            raise
        finally:
            if llm.record.num_requests == 0:  # the loop made no request, so the engine must not wait for one
                self.engine.expect(-1)
        outcome = await self._score(prompt, index, trajectories)
        return replace(outcome, counts=llm.totals(trajectories))

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

    async def load_weights(self, source: WeightSource, probe: Probe | None) -> None:
        """Load new weights into the engine; with a probe, check that the engine then agrees with the trainer."""
        broadcasts = self.engine.capabilities.broadcast and self.spec.weight_sync != "file"
        if source.sender is not None and not broadcasts:
            source = await self.copies.fetch(source, source.sender)
        await self.engine.load_weights(source)
        if probe is not None:
            await verify_logprobs(self.engine, probe)

    async def close(self) -> None:
        try:
            await self.engine.close()
        finally:
            self.copies.close()
            if isinstance(self.loop, AgentLoop):
                await self.loop.close()
            if self.scorer is not None:
                self.scorer.close()
