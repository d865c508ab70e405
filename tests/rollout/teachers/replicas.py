"""Stand-ins for the processes of teachers, which answer, fail or stay silent as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from tqppo.errors import TqppoError
from tqppo.processes.hosting import Call, HostDied, Process
from tqppo.rollout.teachers.client import TeacherRoute
from tqppo.rollout.teachers.worker import ScoredRows, TeacherWorker


class FakeReplica(Process[TeacherWorker]):
    """`behaviours` are taken one per call, the last for ever: "ok", "dead", "silent" or an error to raise."""

    def __init__(self, *behaviours: str | TqppoError) -> None:
        self.behaviours = list(behaviours) or ["ok"]
        self.calls: list[Any] = []
        self.methods: dict[Callable[..., Any], Callable[..., Coroutine[Any, Any, Any]]] = {
            TeacherWorker.score: self._score,
            TeacherWorker.logprobs: self._logprobs,
            TeacherWorker.ready: self._ready,
        }

    def _start(self, method: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Call[Any]:
        future = asyncio.run_coroutine_threadsafe(self.methods[method](*args), asyncio.get_running_loop())
        return Call(future, future.cancel)

    def kill(self) -> None: ...

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
            raise HostDied("the actor died")
        if isinstance(behaviour, TqppoError):
            raise behaviour
        await asyncio.sleep(0)


def route(name: str, *replicas: FakeReplica, index: int = 0, **fields: Any) -> TeacherRoute:
    logs = tuple(f"/nowhere/teacher-{name}-{i}.log" for i in range(len(replicas)))
    made: Any = tuple(replicas)
    return TeacherRoute(name, index, made, **{"logs": logs, "timeout_s": 0.2, **fields})
