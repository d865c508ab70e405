"""The teachers as a rollout worker sees them: which one scores a prompt, on which replica, and until when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError, QueueError, TqppoError
from tqppo.processes.hosting import Call, HostDied, Process
from tqppo.protocols import Incident
from tqppo.rollout.teachers.figures import RolloutReport, TeacherFigures
from tqppo.rollout.teachers.worker import RowsToScore, TeacherWorker

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before the first repetition of a call; doubles with each
LOG_LINES = 20

T = TypeVar("T")
Ask = Callable[[Process[TeacherWorker]], Call[T]]


@dataclass(frozen=True, slots=True)
class TeacherRoute:
    """One teacher: the rows that it scores, and its replicas."""

    name: str
    index: int  # in the config's order
    replicas: tuple[Process[TeacherWorker], ...]
    logs: tuple[str, ...]  # of each replica
    match: tuple[str, ...] = ()  # values of the routing column; empty: all rows
    prompt: str = ""  # the template of its own prompt
    is_deterministic: bool = True
    timeout_s: float = 120.0
    retries: int = 2
    start_timeout_s: float = 600.0  # of a replica that Ray restarts


@dataclass(frozen=True, slots=True)
class TeacherRoutes:
    """All teachers of a run, and how rows are spread over them."""

    teachers: tuple[TeacherRoute, ...]
    column: str = ""  # that chooses the teacher; empty: the prompt's source
    batch_rows: int = 32
    drops_groups: bool = False  # of a teacher that fails; otherwise the run ends
    hidden_width: int = 0

    def of(self, prompt: Prompt) -> TeacherRoute | None:
        """The teacher of a prompt; None if no teacher scores it."""
        value = str(prompt.column(self.column)) if self.column else prompt.source
        return next((each for each in self.teachers if not each.match or value in each.match), None)

    def required(self, prompt: Prompt) -> TeacherRoute:
        found = self.of(prompt)
        if found is None:
            value = repr(prompt.column(self.column)) if self.column else repr(prompt.source)
            known = "; ".join(f"{each.name}: {', '.join(each.match)}" for each in self.teachers)
            column = self.column or "source"
            raise DataError(f"prompt {prompt.uid}: no teacher scores rows whose {column} is {value}; known: {known}")
        return found


@dataclass(slots=True)
class TeacherReplicas:
    """Which replicas of a teacher are in use, and which have stopped answering."""

    num_calls: list[int]
    silent: set[int] = field(default_factory=set)

    def choose(self, turn: int, *, in_turn: bool) -> int | None:
        """Choose a replica: round-robin in deterministic runs, else the least loaded. None if none responds."""
        order = [(turn + place) % len(self.num_calls) for place in range(len(self.num_calls))]
        answering = [place for place in order if place not in self.silent]
        if not answering:
            return None
        return answering[0] if in_turn else min(answering, key=lambda place: self.num_calls[place])


class TeacherClient:
    """Calls teachers with a deadline, repeats calls that fail, and counts. `place` is the rollout worker's number."""

    def __init__(self, routes: TeacherRoutes, place: int = 0) -> None:
        self.routes = routes
        self.place = place
        self.report = RolloutReport()
        self._replicas = {each.name: TeacherReplicas([0] * len(each.replicas)) for each in routes.teachers}
        self._first: dict[str, float] = {}  # when a teacher's first call of this report began

    async def score(self, route: TeacherRoute, rows: RowsToScore, *, turn: int) -> None:
        """Have a teacher put its columns on these rows. Raises `EngineError` if it cannot."""
        figures = self.report.of(route.name)
        scored = await self._ask(route, lambda replica: replica.call(TeacherWorker.score, rows), turn, figures)
        figures.rows += len(rows.batch)
        figures.tokens += scored.tokens
        figures.cached_rows += scored.cached_rows

    async def logprobs(
        self, route: TeacherRoute, tokens: list[list[int]], starts: list[int], *, turn: int
    ) -> list[np.ndarray]:
        """A teacher's log-probabilities of the tokens after `starts`."""
        figures = self.report.of(route.name)
        answer: list[np.ndarray] = await self._ask(
            route, lambda replica: replica.call(TeacherWorker.logprobs, tokens, starts), turn, figures
        )
        figures.rows += len(tokens)
        figures.tokens += sum(map(len, tokens))
        return answer

    def take_report(self) -> RolloutReport:
        """What happened since the last call. Replicas that were silent are asked again from now on."""
        report, self.report, self._first = self.report, RolloutReport(), {}
        for replicas in self._replicas.values():
            replicas.silent.clear()
        return report

    async def _ask(self, route: TeacherRoute, ask: Ask[T], turn: int, figures: TeacherFigures) -> T:
        began = time.monotonic()
        self._first.setdefault(route.name, began)
        figures.requests += 1
        try:
            return await self._attempts(route, ask, turn, figures)
        except EngineError:
            figures.failures += 1
            raise
        finally:
            ended = time.monotonic()
            figures.seconds.append(ended - began)
            figures.span_s = ended - self._first[route.name]

    async def _attempts(self, route: TeacherRoute, ask: Ask[T], turn: int, figures: TeacherFigures) -> T:
        replicas, failure, failed = self._replicas[route.name], "it has no replica that answers", 0
        for attempt in range(route.retries + 1):
            chosen = replicas.choose(self.place + turn + attempt, in_turn=route.is_deterministic)
            if chosen is None:
                break
            if attempt:
                figures.retries += 1
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
            failed = chosen
            replicas.num_calls[chosen] += 1
            try:
                return await asyncio.wait_for(_answer(ask(route.replicas[chosen])), route.timeout_s)
            except TimeoutError:
                replicas.silent.add(chosen)
                failure = f"no answer within {route.timeout_s:g} s"
            except HostDied as error:
                failure = f"its process died: {_first_line(error)}"
                await self._made_anew(route, chosen)
            except EngineError as error:
                failure = str(error)
            finally:
                replicas.num_calls[chosen] -= 1
            log.warning("teacher %s, replica %d: %s", route.name, chosen, failure)
            self.report.incidents.append(Incident(f"teacher {route.name}, replica {chosen}", failure))
        raise EngineError(_message(route, failed, failure))

    async def _made_anew(self, route: TeacherRoute, replica: int) -> None:
        """Wait until Ray has replaced a dead replica. Returns at once if it does not; the next attempt says why."""
        deadline = time.monotonic() + route.start_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                return await asyncio.wait_for(_answer(route.replicas[replica].call(TeacherWorker.ready)), left)
            except HostDied as error:
                if not error.may_return:
                    return None
                await asyncio.sleep(PAUSE_S)
            except (EngineError, TimeoutError):
                return None
        return None


async def _answer(scoring: Call[T]) -> T:
    """The call's result. An error of ours is one of the teacher, which is asked again."""
    try:
        return await scoring
    except QueueError:  # the rows cannot be had: no other attempt could score them
        raise
    except TqppoError as error:
        raise EngineError(str(error)) from None


def _message(route: TeacherRoute, replica: int, failure: str) -> str:
    of = f" of {len(route.replicas)}" if len(route.replicas) > 1 else ""
    tail = log_tail(route.logs[replica])
    return f"teacher {route.name}, replica {replica}{of}: {failure}" + (f"\n{tail}" if tail else "")


def log_tail(path: str) -> str:
    """The last lines of a log file, under its name; empty if it is not on this machine."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return ""
    return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def in_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
