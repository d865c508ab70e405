"""Writes finished groups into the queue with their teachers' columns, a chunk of prompts at a time.

A chunk is a run of consecutive prompts of one teacher, cut by the step's prompts alone. So a teacher is asked for the
same batches in every repetition of a step, whatever finishes first. A chunk is scored while others are being sampled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tqppo.columns import PromptTags
from tqppo.data.prompts import Prompt
from tqppo.errors import EngineError
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.teachers.client import TeacherClient, TeacherRoute, in_chunks
from tqppo.rollout.teachers.privileged import before_response
from tqppo.rollout.teachers.worker import RowsToScore
from tqppo.rollout.writer import GroupRow, Outcome, group_marker, group_rows, row_columns

StudentLogprobs = Callable[[list[list[int]], list[int]], Awaitable[list[np.ndarray]]]


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group with its rows and its marker; `prompt` is its prompt."""

    order: int
    prompt: Prompt
    rows: list[GroupRow]
    marker: PromptTags


@dataclass(slots=True)
class Chunk:
    """Prompts that are scored together. `route` is None in validation, for prompts that no teacher scores."""

    number: int  # among the chunks of its teacher
    route: TeacherRoute | None
    size: int
    groups: list[FinishedGroup] = field(default_factory=list)


def cut_chunks(
    prompts: Sequence[Prompt], route_of: Callable[[Prompt], TeacherRoute | None], prompts_per_chunk: int
) -> dict[str, Chunk]:
    """The chunk of each prompt, by uid."""
    by_teacher: dict[str, list[Prompt]] = {}
    routes: dict[str, TeacherRoute | None] = {}
    for prompt in prompts:
        route = route_of(prompt)
        name = "" if route is None else route.name
        routes[name] = route
        by_teacher.setdefault(name, []).append(prompt)
    return {
        prompt.uid: chunk
        for name, members in by_teacher.items()
        for number, part in enumerate(in_chunks(members, prompts_per_chunk))
        for chunk in [Chunk(number, routes[name], len(part))]
        for prompt in part
    }


class ChunkWriter:
    """Puts groups into the queue once their whole chunk is scored."""

    def __init__(
        self,
        queue: Queue,
        task: Assignment,
        prompts: Sequence[Prompt],
        teachers: TeacherClient,
        *,
        own_prompt: Callable[[str, Prompt], list[int]],
        student_logprobs: StudentLogprobs,
    ) -> None:
        self.queue, self.task, self.teachers = queue, task, teachers
        self.own_prompt, self.student_logprobs = own_prompt, student_logprobs
        routes = teachers.routes
        per_chunk = max(1, routes.batch_rows // task.num_sessions)
        self.chunks = cut_chunks(prompts, routes.required if task.keep_tensors else routes.of, per_chunk)
        self.last_sampled = time.monotonic()

    async def add(
        self,
        order: int,
        prompt: Prompt,
        outcomes: Sequence[Outcome],
        errors: Sequence[BaseException],
        *,
        retries: int = 0,
    ) -> None:
        """Take a finished group. The last of a chunk returns when the chunk is scored and in the queue."""
        self.last_sampled = time.monotonic()
        rows = group_rows(order, prompt, outcomes, self.task)
        marker = group_marker(order, len(rows), outcomes, errors, retries)
        chunk = self.chunks[prompt.uid]
        chunk.groups.append(FinishedGroup(order, prompt, rows, marker))
        if len(chunk.groups) == chunk.size:
            chunk.groups.sort(key=lambda group: group.order)
            await (self._train(chunk) if self.task.keep_tensors else self._validate(chunk))

    async def finish(self) -> None:
        """Every chunk is in the queue by now; note how long that took after the last row was sampled."""
        self.teachers.report.exposed_s = time.monotonic() - self.last_sampled

    async def _train(self, chunk: Chunk) -> None:
        rows = [row for group in chunk.groups for row in group.rows]
        markers = {group.prompt.uid: group.marker for group in chunk.groups}
        if rows:
            markers = await self._put_scored(chunk, rows) or markers
        # The markers come last: a group whose marker is in the queue has all its rows and columns there.
        await self.queue.aio.tag(markers, partition=self.task.partition)

    async def _put_scored(self, chunk: Chunk, rows: list[GroupRow]) -> dict[str, PromptTags] | None:
        """Put rows and have them scored. If their teacher fails and the config says so, their groups' new markers."""
        route = chunk.route
        assert route is not None, "every prompt that is trained on has a teacher"
        columns = row_columns(rows)
        columns["teacher_index"] = torch.full((len(rows),), route.index, dtype=torch.int64)
        tags = [row.tags for row in rows]
        batch = await self.queue.aio.put([row.key for row in rows], columns, partition=self.task.partition, tags=tags)
        call = RowsToScore(
            batch=type(batch)(batch.partition, batch.keys, columns=("tokens",)),
            prompt_lengths=tuple(len(row.trajectory.prompt_tokens) for row in rows),
            own_prompts=self._own_prompts(chunk, route),
            width=self.teachers.routes.hidden_width,
        )
        try:
            await self.teachers.score(route, call, turn=chunk.number)
        except EngineError as error:
            if not self.teachers.routes.drops_groups:
                raise
            await self.queue.aio.clear(batch)
            self.teachers.report.of(route.name).dropped_groups += len(chunk.groups)
            return {group.prompt.uid: _dropped(group.marker, error) for group in chunk.groups}
        return None

    def _own_prompts(self, chunk: Chunk, route: TeacherRoute) -> tuple[tuple[int, ...], ...]:
        """The teacher's prompt for each row; empty if it reads the student's."""
        if not route.prompt:
            return ()
        found: list[tuple[int, ...]] = []
        for group in chunk.groups:
            own = self.own_prompt(route.prompt, group.prompt)
            found += [before_response(own, group.prompt, row.trajectory.prompt_tokens) for row in group.rows]
        return tuple(found)

    # -- validation ----------------------------------------------------------------------------------------------------

    async def _validate(self, chunk: Chunk) -> None:
        """Tags only. Sampled answers carry how far the student is from the teacher on them."""
        rows = [row for group in chunk.groups for row in group.rows]
        if chunk.route is not None and any(map(self._is_compared, rows)):
            await self._compare(chunk, chunk.route)
        if rows:
            await self.queue.aio.tag({row.key: row.tags for row in rows}, partition=self.task.partition)
        markers = {group.prompt.uid: group.marker for group in chunk.groups}
        await self.queue.aio.tag(markers, partition=self.task.partition)

    def _is_compared(self, row: GroupRow) -> bool:
        """The mean of log q - log p over tokens that q sampled is the reverse KL; greedy tokens are not sampled."""
        return row.tags["session"] != self.task.group_size and any(row.trajectory.response_mask)

    async def _compare(self, chunk: Chunk, route: TeacherRoute) -> None:
        own = self._own_prompts(chunk, route)
        places = [(group, row) for group in chunk.groups for row in group.rows]
        compared = [place for place, (_, row) in enumerate(places) if self._is_compared(row)]
        rows = [places[place][1] for place in compared]
        prompts = [list(own[place]) if own else list(places[place][1].trajectory.prompt_tokens) for place in compared]
        tokens = [[*prompt, *row.trajectory.response_tokens] for prompt, row in zip(prompts, rows, strict=True)]
        try:
            teacher = await self.teachers.logprobs(
                route, tokens, [len(prompt) - 1 for prompt in prompts], turn=chunk.number
            )
        except EngineError:
            if not self.teachers.routes.drops_groups:
                raise
            return
        student = await self._student(rows)
        for row, p, q in zip(rows, teacher, student, strict=True):
            mask = np.array(row.trajectory.response_mask, dtype=bool)
            row.tags["teacher"] = route.name
            row.tags["teacher_kl"] = float((q.astype(np.float64) - p)[mask].sum())
            row.tags["teacher_tokens"] = int(mask.sum())

    async def _student(self, rows: Sequence[GroupRow]) -> list[np.ndarray]:
        """The student's log-probabilities at temperature 1: the sampler's, unless it changed the distribution."""
        sampling = self.task.sampling
        if (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0):
            return [np.array(row.trajectory.logprobs, dtype=np.float32) for row in rows]
        tokens = [[*row.trajectory.prompt_tokens, *row.trajectory.response_tokens] for row in rows]
        return await self.student_logprobs(tokens, [len(row.trajectory.prompt_tokens) - 1 for row in rows])


def _dropped(marker: PromptTags, error: EngineError) -> PromptTags:
    return {**marker, "status": "dropped", "rows": 0, "error": str(error)}
