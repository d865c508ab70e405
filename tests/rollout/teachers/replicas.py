"""Stand-ins for the Ray actors of teachers, which answer, fail or stay silent as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from tqppo.errors import TqppoError
from tqppo.rollout.teachers.client import TeacherRoute
from tqppo.rollout.teachers.worker import ScoredRows


class Method:
    """A method of an actor: `remote` starts it, and what it returns can be awaited."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.work(*arguments))


class FakeReplica:
    """`behaviours` are taken one per call, the last for ever: "ok", "dead", "silent" or an error to raise."""

    def __init__(self, *behaviours: str | TqppoError) -> None:
        self.behaviours = list(behaviours) or ["ok"]
        self.calls: list[Any] = []
        self.score = Method(self._score)
        self.logprobs = Method(self._logprobs)
        self.ready = Method(self._ready)

    async def _score(self, rows: Any) -> ScoredRows:
        await self._behave(rows)
        return ScoredRows(tokens=10 * len(rows.batch), cached_rows=1)

    async def _ready(self) -> None:
        """A replica that died is back at once."""

    async def _logprobs(self, tokens: Any, starts: Any) -> Any:
        import numpy as np

        await self._behave(tokens)
        return [np.full(len(each) - 1 - start, -2.0, np.float32) for each, start in zip(tokens, starts, strict=True)]

    async def _behave(self, argument: Any) -> None:
        self.calls.append(argument)
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        if behaviour == "silent":
            await asyncio.sleep(3600)
        if behaviour == "dead":
            raise RayActorError(error_msg="the actor died")
        if isinstance(behaviour, TqppoError):
            raise RayTaskError("score", "traceback", behaviour)
        await asyncio.sleep(0)


def route(name: str, *replicas: FakeReplica, index: int = 0, **fields: Any) -> TeacherRoute:
    logs = tuple(f"/nowhere/teacher-{name}-{i}.log" for i in range(len(replicas)))
    made: Any = tuple(replicas)
    return TeacherRoute(name, index, made, **{"logs": logs, "timeout_s": 0.2, **fields})
