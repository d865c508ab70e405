"""Writes finished groups into the queue: trajectories become rows with columns and tags, each prompt gets a marker.

The rollout worker makes one writer per call of `generate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from tqppo.columns import PromptTags, RowTags
from tqppo.data.prompts import Prompt
from tqppo.queue.client import Queue
from tqppo.queue.meta import Jagged
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.turns import turn_columns

ANSWER_CHARACTERS = 200  # of a validation answer, kept in its tag for maj@k
GATHER_S = 0.05  # how long a finished group waits for others to share its put: every put costs calls between processes


@dataclass(slots=True)
class Outcome:
    """A finished session: its trajectories, and the reward of the last one."""

    session: int
    trajectories: list[Trajectory]
    reward: float
    answer: str
    extra: dict[str, float]
    drop_group: bool = False
    counts: dict[str, float] = field(default_factory=dict)  # of the session: tool calls and the like


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One trajectory on its way into the queue."""

    key: str
    trajectory: Trajectory
    reward: float
    baseline: float | None  # reward of the group's greedy session, if there is one
    tags: RowTags
    is_last: bool  # of its session

    @property
    def turns(self) -> tuple[Trajectory, float]:
        """The trajectory, and what its last turn earns where the loop rewards no turns: the session's reward."""
        return self.trajectory, self.reward if self.is_last else 0.0


class GroupWriter:
    """Puts groups into the queue. Groups that finish within GATHER_S, or while a put is running, share one put."""

    def __init__(self, queue: Queue, task: Assignment) -> None:
        self.queue = queue
        self.task = task
        self.rows: list[GroupRow] = []
        self.markers: dict[str, PromptTags] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.flushing: asyncio.Task[None] | None = None

    async def add(
        self,
        order: int,
        prompt: Prompt,
        outcomes: Sequence[Outcome],
        errors: Sequence[BaseException],
        *,
        retries: int = 0,
    ) -> None:
        """Take a group whose sessions are all settled; `retries` counts the further attempts of failed sessions."""
        rows = group_rows(order, prompt, outcomes, self.task)
        self.rows += rows
        self.markers[prompt.uid] = group_marker(order, len(rows), outcomes, errors, retries)
        if self.flushing is not None and self.flushing.done():
            self.flushing.result()  # raises the error of a failed put now instead of after all prompts are sampled
            self.flushing = None
        if self.timer is None and self.flushing is None:
            self.timer = asyncio.get_running_loop().call_later(GATHER_S, self._start)

    async def finish(self) -> None:
        """Wait until every group that was added is in the queue."""
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
        partition = self.task.partition
        if rows and self.task.keep_tensors:
            tags = [row.tags for row in rows]
            columns = row_columns(rows) | (turn_columns([row.turns for row in rows]) if self.task.turns else {})
            await self.queue.aio.put([row.key for row in rows], columns, partition=partition, tags=tags)
        elif rows:
            await self.queue.aio.tag({row.key: row.tags for row in rows}, partition=partition)
        # The markers come last: a group whose marker is in the queue has all its rows there.
        await self.queue.aio.tag(markers, partition=partition)


def group_rows(order: int, prompt: Prompt, outcomes: Sequence[Outcome], task: Assignment) -> list[GroupRow]:
    """The rows of one group. In training the greedy session is a baseline: its reward is kept, its row is not.

    A group whose baseline session failed has no rows, because nothing can be estimated from them.
    """
    has_baseline = task.greedy and task.keep_tensors
    baseline = next((each.reward for each in outcomes if has_baseline and each.session == task.group_size), None)
    if has_baseline and baseline is None:
        return []
    return [
        GroupRow(
            key=f"{prompt.uid}_{outcome.session}_{number}",
            trajectory=trajectory,
            reward=_row_reward(outcome, number),
            baseline=baseline,
            tags=_row_tags(order, prompt, outcome, number, baseline=baseline, with_answer=not task.keep_tensors),
            is_last=number == len(outcome.trajectories) - 1,
        )
        for outcome in outcomes
        if not (has_baseline and outcome.session == task.group_size)
        for number, trajectory in enumerate(outcome.trajectories)
    ]


def _row_reward(outcome: Outcome, number: int) -> float:
    """What the loop gave this trajectory, or the reward of its session."""
    own = outcome.trajectories[number].reward
    return outcome.reward if own is None else own


def _row_tags(
    order: int, prompt: Prompt, outcome: Outcome, number: int, *, baseline: float | None, with_answer: bool
) -> RowTags:
    trajectory = outcome.trajectories[number]
    num_prompt, num_response = len(trajectory.prompt_tokens), len(trajectory.response_tokens)
    tags: RowTags = {
        "uid": prompt.uid,
        "session": outcome.session,
        "trajectory": number,
        "order": order,
        "prompt_len": num_prompt,
        "response_len": num_response,
        "seq_len": num_prompt + num_response,
        "reward": _row_reward(outcome, number),
        "finish": trajectory.finish,
        "turns": trajectory.num_turns,
        "weight_version": trajectory.weight_version,
        "source": prompt.source,
    }
    if outcome.extra:
        tags["extra"] = outcome.extra
    if trajectory.metrics:
        tags["metrics"] = dict(trajectory.metrics)
    if outcome.counts and number == len(outcome.trajectories) - 1:
        tags["counts"] = outcome.counts
    if baseline is not None:
        tags["baseline"] = baseline
    if with_answer:
        tags["answer"] = outcome.answer[:ANSWER_CHARACTERS]
        tags["last"] = number == len(outcome.trajectories) - 1
    return tags


def group_marker(
    order: int, rows: int, outcomes: Sequence[Outcome], errors: Sequence[BaseException], retries: int = 0
) -> PromptTags:
    """The tags of a prompt's own row, which says how its group ended."""
    failed = len(errors) + sum(not outcome.trajectories for outcome in outcomes)
    status = "failed" if failed else "finished"
    if any(outcome.drop_group for outcome in outcomes):
        status = "dropped"
    error = f"{type(errors[0]).__name__}: {errors[0]}" if errors else ""
    return {
        "is_prompt": True,
        "status": status,
        "order": order,
        "rows": rows,
        "error": error,
        "failed_sessions": failed,
        "retries": retries,
    }


def row_columns(rows: Sequence[GroupRow]) -> dict[str, Jagged | torch.Tensor]:
    """The queue's columns for these rows, each as one flat tensor."""
    trajectories = [row.trajectory for row in rows]
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
    columns: dict[str, Jagged | torch.Tensor] = {
        "tokens": Jagged(torch.from_numpy(tokens), torch.tensor(sequences)),
        "response_mask": Jagged(torch.from_numpy(mask), response_lengths),
        "rollout_logprobs": Jagged(torch.from_numpy(logprobs), response_lengths),
        "reward": torch.tensor([row.reward for row in rows], dtype=torch.float32),
    }
    baselines = [row.baseline for row in rows if row.baseline is not None]
    if baselines:
        columns["baseline_reward"] = torch.tensor(baselines, dtype=torch.float32)
    return columns
