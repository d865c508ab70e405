"""The rollout worker: agent loops and the engine replica they talk to, in one process. `pool` launches it.

Finished groups go straight from here into the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from tqppo import plugins
from tqppo.data.prompts import Prompt
from tqppo.processes.garbage import spare_what_started
from tqppo.processes.nodes import this_node
from tqppo.protocols import EngineSpec, ReportsIncidents, RolloutEngine, WeightSource
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.chunks import ChunkWriter
from tqppo.rollout.loops.base import AgentLoop, RunsSessions, load_loop
from tqppo.rollout.player import SessionLimits, SessionPlayer
from tqppo.rollout.teachers.client import TeacherClient, TeacherRoutes
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.teachers.privileged import own_prompt
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.writer import GroupWriter
from tqppo.untrusted import loading
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
    max_sessions: int = 0  # played at a time; 0: all
    trust_remote_code: bool = False
    weight_sync: str = "auto"
    chat_template: bool = True  # whether prompts are rendered as chats

    @property
    def limits(self) -> SessionLimits:
        return SessionLimits(
            max_context_tokens=self.engine.max_context_tokens,
            max_trajectories=self.max_trajectories,
            retries=self.session_retries,
            max_sessions=self.max_sessions,
        )


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

        with loading(f"the tokenizer of {self.spec.tokenizer!r}"):
            loaded = AutoTokenizer.from_pretrained(self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code)
        self.chat = ChatTemplate(cast(Tokenizer, loaded))
        self.scorer = Scorer(self.spec.reward)
        if isinstance(self.loop, AgentLoop):
            await self.loop.start(self.chat)
        await self.engine.start()
        spare_what_started()
        return this_node()

    async def use_teachers(self, routes: TeacherRoutes, place: int) -> None:
        """Have rows scored from now on. `place` is this worker's number."""
        self.teachers = TeacherClient(routes, place)

    async def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        """Sample every session of these (order, prompt) pairs; returns when all groups are in the queue, and scored.

        When a session ends the run, or the call is cancelled, the other sessions are cancelled with their requests.
        """
        assert self.scorer is not None, "start() comes first"
        writer = self._writer([prompt for _, prompt in prompts], task)
        player = SessionPlayer(self.engine, self.loop, self.chat, self.scorer, self.spec.limits, task)
        await player.play(prompts, writer)
        await writer.finish()
        report = RolloutReport() if self.teachers is None else self.teachers.take_report()
        report.incidents += self.scorer.take_incidents()
        if isinstance(self.engine, ReportsIncidents):
            report.incidents += self.engine.take_incidents()
        return report

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

    async def sleep(self) -> None:
        """Leave the devices to the trainer."""
        await self.engine.sleep()

    async def wake(self, *, cache: bool) -> None:
        await self.engine.wake(cache=cache)

    async def held_bytes(self) -> int | None:
        return self.engine.held_bytes()

    async def load_weights(self, source: WeightSource, probe: Probe | None = None) -> float:
        """Load new weights into the engine. With a probe, returns the largest difference to the trainer, else 0."""
        broadcasts = self.engine.capabilities.broadcast and self.spec.weight_sync != "file"
        if source.sender is not None and not broadcasts:
            source = await self.copies.fetch(source, source.sender)
        await self.engine.load_weights(source)
        return 0.0 if probe is None else await self.verify(probe)

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
