"""The teachers of a run as the driver sees them: start their replicas, compare these with each other, take them down.

Teachers are standalone: they never sleep and get no weights. Rollout workers call them directly, by `routes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqppo.devices.seats import Seat
from tqppo.errors import CheckpointError, EngineError, PreflightError
from tqppo.processes.hosting import Hosting, Launcher, Process, close_all, results
from tqppo.queue.client import Queue
from tqppo.rollout.teachers.client import TeacherRoute, TeacherRoutes
from tqppo.rollout.teachers.worker import ReadyTeacher, TeacherSpec, TeacherWorker

START_GRACE_S = 60.0  # for Ray to start a process, on top of the engine's own deadline
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class TeacherSetup:
    """One teacher: its replicas, the rows that it scores, and how patient its callers are."""

    spec: TeacherSpec
    replicas: int = 1
    endpoints: tuple[str, ...] = ()
    match: tuple[str, ...] = ()
    prompt: str = ""
    is_deterministic: bool = True
    timeout_s: float = 120.0
    retries: int = 2
    tolerance: float = 1e-3  # of mean log-probabilities: of one replica asked twice, and between replicas
    seats: tuple[Seat, ...] = ()  # of the replicas; none: one CPU each

    def specs(self) -> list[TeacherSpec]:
        """The spec of each replica."""
        engine, name = self.spec.engine, self.spec.name
        return [
            replace(self.spec, engine=replace(engine, name=f"teacher-{name}-{i}", endpoint=endpoint))
            for i, endpoint in enumerate(self.endpoints or [""] * self.replicas)
        ]

    def all_seats(self) -> Sequence[Seat]:
        return self.seats or [Seat()] * len(self.specs())


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows are spread over the teachers; see `TeacherRoutes`."""

    column: str = ""
    batch_rows: int = 32
    drops_groups: bool = False


class TeacherPool:
    """One process per replica of each teacher. Ray restarts a dead replica, up to the engine's `max_restarts`."""

    def __init__(self, setups: Sequence[TeacherSetup], queue: Queue, routing: Routing) -> None:
        self.setups, self.queue, self.routing = list(setups), queue, routing
        self.workers: list[list[Process[TeacherWorker]]] = []
        self.replicas: list[list[ReadyTeacher]] = []

    def start(self, launcher: Launcher) -> None:
        self.workers = [
            [self._make(launcher, spec, seat) for spec, seat in zip(setup.specs(), setup.all_seats(), strict=True)]
            for setup in self.setups
        ]
        self.starting = [[worker.call(TeacherWorker.start) for worker in group] for group in self.workers]

    def _make(self, launcher: Launcher, spec: TeacherSpec, seat: Seat) -> Process[TeacherWorker]:
        how = Hosting(seat, concurrency=1000, restarts=spec.engine.max_restarts)
        return launcher.launch(how, TeacherWorker, replace(spec, engine=spec.engine.on(seat)), self.queue.handle())

    def ready(self) -> None:
        """Wait until every replica can score, and check that the replicas of a teacher say the same."""
        self.replicas = []
        for setup, starting in zip(self.setups, self.starting, strict=True):
            name, timeout_s = setup.spec.name, setup.spec.engine.start_timeout_s + START_GRACE_S
            found = results(starting, timeout_s, f"starting teacher {name}", died=EngineError)
            check_agreement(setup, found)
            self.replicas.append(found)

    def routes(self) -> TeacherRoutes:
        widths = [replica.hidden_size for group in self.replicas for replica in group]
        return TeacherRoutes(
            teachers=tuple(
                TeacherRoute(
                    name=setup.spec.name,
                    index=index,
                    replicas=tuple(workers),
                    logs=tuple(_log_of(spec) for spec in setup.specs()),
                    match=setup.match,
                    prompt=setup.prompt,
                    is_deterministic=setup.is_deterministic,
                    timeout_s=setup.timeout_s,
                    retries=setup.retries,
                    start_timeout_s=setup.spec.engine.start_timeout_s,
                )
                for index, (setup, workers) in enumerate(zip(self.setups, self.workers, strict=True))
            ),
            column=self.routing.column,
            batch_rows=self.routing.batch_rows,
            drops_groups=self.routing.drops_groups,
            hidden_width=max(widths, default=0),
        )

    def held_bytes(self, device_bytes: int) -> dict[str, int]:
        """Memory that each teacher takes of each of its devices, which have `device_bytes`. It stays the same."""
        found = {}
        for setup, replicas in zip(self.setups, self.replicas, strict=True):
            share = int(setup.spec.engine.memory_fraction * device_bytes)
            found[setup.spec.name] = max(share if each.held_bytes is None else each.held_bytes for each in replicas)
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the teachers: what identifies each."""
        return {
            setup.spec.name: {"fingerprint": found[0].fingerprint, "probe": found[0].probes[0]}
            for setup, found in zip(self.setups, self.replicas, strict=True)
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if the teachers are not those of the checkpoint."""
        own = {setup.spec.name: (setup, found[0]) for setup, found in zip(self.setups, self.replicas, strict=True)}
        changed = sorted(own.keys() ^ saved.keys())
        changed += [name for name in sorted(own.keys() & saved.keys()) if _differs(*own[name], saved[name])]
        if changed:
            models = {name: setup.spec.engine.model for name, (setup, _) in own.items()}
            named = ", ".join(f"{name} ({models[name]})" if name in models else name for name in changed)
            raise CheckpointError(
                f"these teachers differ from the checkpoint's: {named}. A resumed run must learn from the same models; "
                "put them back, or start a new run"
            )

    def close(self) -> None:
        """Close every replica, and kill those that do not close in time."""
        close_all([worker for group in self.workers for worker in group], TeacherWorker.close, CLOSE_TIMEOUT_S)
        self.workers = []


def _log_of(spec: TeacherSpec) -> str:
    return str(Path(spec.engine.log_dir) / f"{spec.engine.name}.log") if spec.engine.log_dir else ""


def _differs(setup: TeacherSetup, now: ReadyTeacher, saved: Mapping[str, Any]) -> bool:
    """Compare file hashes if both are known, else scores of the fixed sequence."""
    if now.fingerprint and saved["fingerprint"]:
        return bool(now.fingerprint != saved["fingerprint"])
    return distance(now.probes[0], saved["probe"]) > setup.tolerance


def check_agreement(setup: TeacherSetup, replicas: Sequence[ReadyTeacher]) -> None:
    """Raise `PreflightError` unless each replica gives the same scores twice, and all replicas those of the first."""
    first, name = replicas[0], setup.spec.name
    for number, replica in enumerate(replicas):
        once, again = replica.probes
        if (apart := distance(once, again)) > setup.tolerance:
            raise PreflightError(
                f"teacher {name}, replica {number}: it scored the same tokens twice, and the mean log-probabilities "
                f"differ by {apart:.2g} (allowed: {setup.tolerance:g}). The student would learn this noise"
            )
        if replica.fingerprint != first.fingerprint:
            raise PreflightError(f"teacher {name}: replicas 0 and {number} have different model files")
        if (apart := distance(first.probes[0], once)) > setup.tolerance:
            raise PreflightError(
                f"teacher {name}: replicas 0 and {number} differ by {apart:.2g} in the mean log-probability of the "
                f"same tokens (allowed: {setup.tolerance:g}). Do they serve the same model with the same dtype?"
            )


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference; infinite if the lengths differ."""
    if len(one) != len(other):
        return float("inf")
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(1, len(one))
