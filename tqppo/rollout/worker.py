"""The rollout worker: agent loops and the engine replica they talk to, in one process. A Ray actor in `pool`.

Finished groups go straight from here into the queue, several in one put when they finish together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import ray
import torch

from tqppo import plugins
from tqppo.data.prompts import Prompt
from tqppo.doctor.compare import verify_logprobs
from tqppo.errors import DataError, EngineError
from tqppo.protocols import EngineSpec, RolloutEngine, Sampling, WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import Jagged
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.loops.single_turn import AgentLoop, Session, Trajectory, load_loop
from tqppo.weights.copy import Copies
from tqppo.weights.send import meeting_place

ANSWER_CHARACTERS = 200  # of a validation answer, kept in its tag for maj@k
GATHER_S = 0.05  # how long a finished group waits for others to share its put: every put costs calls between processes


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a rollout worker is told: plain values, no config."""

    backend: str
    engine: EngineSpec
    tokenizer: str
    reward: ScorerSpec
    agent: str = "single_turn"
    agent_args: dict[str, Any] = field(default_factory=dict)
    max_trajectories: int = 1
    trust_remote_code: bool = False
    weight_sync: str = "auto"


@dataclass(frozen=True, slots=True)
class Assignment:
    """How to sample the prompts of one step (or of one validation)."""

    seed: int
    step: int
    group_size: int
    sampling: Sampling
    partition: str = "train"
    greedy: bool = False  # one more session per prompt, at temperature 0: ReMax's baseline, validation's greedy answer
    keep_tensors: bool = True  # off in validation, where only tags are read


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence, and what the trainer says of it: `logprobs[i]` is about token i + 1."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float


@dataclass(slots=True)
class Outcome:
    """A settled session: its trajectories and the reward of the last one."""

    session: int
    trajectories: list[Trajectory]
    reward: float
    answer: str
    extra: dict[str, float]
    drop_group: bool = False


class RolloutWorker:
    """Runs sessions; the constructor starts nothing."""

    def __init__(self, spec: RolloutSpec, queue: Queue) -> None:
        self.spec = spec
        self.queue = queue
        engine = replace(spec.engine, interface=meeting_place()[1])
        self.engine: RolloutEngine = plugins.load("rollout", spec.backend)(engine)
        self.copies = Copies()
        self.loop: AgentLoop = load_loop(spec.agent, dict(spec.agent_args))

    async def start(self) -> str:
        """Returns Ray's name of this node."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(
            self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code
        )
        self.scorer = Scorer(self.spec.reward)
        await self.engine.start()
        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""

    async def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> None:
        """Sample every session of these (order, prompt) pairs; returns when all groups are in the queue."""
        sessions = task.group_size + task.greedy
        self.engine.expect(len(prompts) * sessions)
        writer = GroupWriter(self.queue, task)
        await asyncio.gather(*(self._group(order, prompt, task, writer) for order, prompt in prompts))
        await writer.finish()

    async def _group(self, order: int, prompt: Prompt, task: Assignment, writer: GroupWriter) -> None:
        """All sessions of one prompt. A failed session marks the group; an engine that is gone ends the run."""
        outcomes = await asyncio.gather(
            *(self._session(order, prompt, index, task) for index in range(task.group_size + task.greedy)),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, (EngineError, DataError, asyncio.CancelledError)):
                raise outcome
        settled = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        writer.add(order, prompt, settled, errors)

    async def _session(self, order: int, prompt: Prompt, index: int, task: Assignment) -> Outcome:
        greedy = index == task.group_size
        llm = Session(
            self.engine,
            replace(task.sampling, temperature=0.0, top_p=1.0, top_k=0) if greedy else task.sampling,
            seed_parts=(task.seed, task.partition, task.step, prompt.uid, index),
            order=(order, index),
        )
        try:
            trajectories = await self.loop.run(prompt, llm)
        finally:
            if llm.turn == 0:  # it never asked: the engine must not wait for it
                self.engine.expect(-1)
        return await self._score(prompt, index, trajectories)

    async def _score(self, prompt: Prompt, index: int, trajectories: list[Trajectory]) -> Outcome:
        if not trajectories:
            return Outcome(index, [], 0.0, "", {})
        if len(trajectories) > self.spec.max_trajectories:
            raise ValueError(
                f"the agent loop returned {len(trajectories)} trajectories for prompt {prompt.uid}, "
                f"session {index}; rollout.max_trajectories is {self.spec.max_trajectories}"
            )
        text = str(self.tokenizer.decode(list(trajectories[-1].response_tokens), skip_special_tokens=True))
        reward = await self.scorer.score(
            prompt.source,
            text,
            prompt.answer,
            prompt.extra,
            response_tokens=len(trajectories[-1].response_tokens),
        )
        answer = text if reward.prediction is None else reward.prediction
        return Outcome(index, trajectories, reward.score, answer, dict(reward.metrics), reward.drop_group)

    async def load_weights(self, source: WeightSource, probe: Probe | None) -> None:
        """Take the new weights; with a probe, prove that they are the trainer's."""
        broadcasts = self.engine.capabilities.broadcast and self.spec.weight_sync != "file"
        if source.sender is not None and not broadcasts:
            source = await self.copies.fetch(source, source.sender)
        await self.engine.load_weights(source)
        if probe is not None:
            await verify_logprobs(self.engine, probe.tokens, probe.logprobs, probe.tolerance)

    async def close(self) -> None:
        try:
            await self.engine.close()
        finally:
            self.copies.close()
            if hasattr(self, "scorer"):
                self.scorer.close()


class GroupWriter:
    """Puts finished groups into the queue: those that finish shortly after each other, or during a put, in one put."""

    def __init__(self, queue: Queue, task: Assignment) -> None:
        self.queue = queue
        self.task = task
        self.rows: list[tuple[str, Trajectory, dict[str, Any]]] = []
        self.markers: dict[str, dict[str, Any]] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.flushing: asyncio.Task[None] | None = None

    def add(self, order: int, prompt: Prompt, outcomes: list[Outcome], errors: list[BaseException]) -> None:
        rows = list(group_rows(order, prompt, outcomes, self.task))
        self.rows += rows
        self.markers[prompt.uid] = group_marker(order, len(rows), outcomes, errors)
        if self.flushing is not None and self.flushing.done():
            self.flushing.result()  # a put that failed ends the rollout here, not when all is sampled
            self.flushing = None
        if self.timer is None and self.flushing is None:
            self.timer = asyncio.get_running_loop().call_later(GATHER_S, self._start)

    async def finish(self) -> None:
        """Everything is in the queue afterwards."""
        if self.timer is not None:
            self.timer.cancel()
        if self.flushing is not None:
            await self.flushing
        await self._flush()

    def _start(self) -> None:
        self.timer = None
        self.flushing = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        while self.markers:
            await self._put()

    async def _put(self) -> None:
        rows, self.rows = self.rows, []
        markers, self.markers = self.markers, {}
        if rows and self.task.keep_tensors:
            keys, trajectories, tags = zip(*rows, strict=True)
            columns = row_columns(trajectories, tags)
            await self.queue.aput(list(keys), columns, partition=self.task.partition, tags=list(tags))
        elif rows:
            await self.queue.atag({key: tags for key, _, tags in rows}, partition=self.task.partition)
        await self.queue.atag(markers, partition=self.task.partition)


def group_rows(
    order: int, prompt: Prompt, outcomes: list[Outcome], task: Assignment
) -> list[tuple[str, Trajectory, dict[str, Any]]]:
    """The rows of a group: key, trajectory, tags. The baseline session of ReMax gives its reward, not a row."""
    baseline = next((each.reward for each in outcomes if each.session == task.group_size), None)
    rows = []
    for outcome in outcomes:
        if outcome.session == task.group_size and task.keep_tensors:
            continue
        for number, trajectory in enumerate(outcome.trajectories):
            tags: dict[str, Any] = {
                "uid": prompt.uid,
                "session": outcome.session,
                "trajectory": number,
                "order": order,
                "prompt_len": len(trajectory.prompt_tokens),
                "response_len": len(trajectory.response_tokens),
                "seq_len": len(trajectory.prompt_tokens) + len(trajectory.response_tokens),
                "reward": outcome.reward,
                "finish": trajectory.finish,
                "turns": trajectory.num_turns,
                "weight_version": trajectory.weight_version,
                "source": prompt.source,
            }
            if outcome.extra:
                tags["extra"] = outcome.extra
            if baseline is not None and task.keep_tensors:
                tags["baseline"] = baseline
            if not task.keep_tensors:
                tags["answer"] = outcome.answer[:ANSWER_CHARACTERS]
                tags["last"] = number == len(outcome.trajectories) - 1
            rows.append((f"{prompt.uid}_{outcome.session}_{number}", trajectory, tags))
    return rows


def group_marker(order: int, rows: int, outcomes: list[Outcome], errors: list[BaseException]) -> dict[str, Any]:
    status = "finished"
    if errors or any(not outcome.trajectories for outcome in outcomes):
        status = "failed"
    if any(outcome.drop_group for outcome in outcomes):
        status = "dropped"
    error = f"{type(errors[0]).__name__}: {errors[0]}" if errors else ""
    return {"is_prompt": True, "status": status, "order": order, "rows": rows, "error": error}


def row_columns(trajectories: Sequence[Trajectory], tags: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The queue's columns of these trajectories, each as one flat tensor."""
    responses = [len(each.response_tokens) for each in trajectories]
    sequences = [len(each.prompt_tokens) + length for each, length in zip(trajectories, responses, strict=True)]
    num_tokens, num_responses = sum(sequences), sum(responses)
    tokens = np.fromiter(
        chain.from_iterable(chain(each.prompt_tokens, each.response_tokens) for each in trajectories),
        np.int64,
        num_tokens,
    )
    mask = np.fromiter(chain.from_iterable(each.response_mask for each in trajectories), np.bool_, num_responses)
    logprobs = np.fromiter(chain.from_iterable(each.logprobs for each in trajectories), np.float32, num_responses)
    response_lengths = torch.tensor(responses)
    columns: dict[str, Any] = {
        "tokens": Jagged(torch.from_numpy(tokens), torch.tensor(sequences)),
        "response_mask": Jagged(torch.from_numpy(mask), response_lengths),
        "rollout_logprobs": Jagged(torch.from_numpy(logprobs), response_lengths),
        "reward": torch.tensor([tag["reward"] for tag in tags], dtype=torch.float32),
    }
    if "baseline" in tags[0]:
        columns["baseline_reward"] = torch.tensor([tag["baseline"] for tag in tags], dtype=torch.float32)
    return columns
