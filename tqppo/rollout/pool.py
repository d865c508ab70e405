"""The replicas of the rollout engine as the driver sees them: dispatch prompts, wait, load weights."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from tqppo.data.prompts import Prompt
from tqppo.devices.seats import Seat
from tqppo.devices.turns import SharedEngines, Turn
from tqppo.engines.capabilities import capabilities_of
from tqppo.errors import EngineError
from tqppo.metrics.events import ProcessReplaced, ReportEvent, unreported
from tqppo.processes.hosting import Call, Hosting, Launcher, Process, Watch, close_all, results
from tqppo.protocols import Party, WeightSource
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.dispatch import Dispatcher
from tqppo.rollout.teachers.client import TeacherRoutes
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.worker import RolloutSpec, RolloutWorker
from tqppo.weights.verify import Probe

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from tqppo.weights.send import Sender

Groups = Sequence[tuple[int, Prompt]]  # prompts with their place in the step

T = TypeVar("T")
START_GRACE_S = 60.0  # for Ray to start a process, on top of the engine's own deadline
CLOSE_TIMEOUT_S = 30.0


class RolloutPool:
    """One process per replica. A group, with all its sessions and their turns, stays on one of them."""

    def __init__(
        self,
        spec: RolloutSpec,
        queue: Queue,
        *,
        endpoints: Sequence[str],
        replicas: int,
        timeout_s: float,
        turn: Turn = Turn(),  # noqa: B008 - frozen
        device_bytes: int = 0,
    ) -> None:
        self.specs = [
            replace(spec, engine=replace(spec.engine, name=f"rollout-{i}", endpoint=endpoint))
            for i, endpoint in enumerate(endpoints or [""] * replicas)
        ]
        self.queue = queue
        self.timeout_s = timeout_s
        self.report: ReportEvent = unreported
        self.has_teachers = False
        self.shared_engines = SharedEngines(self, turn)
        self.device_bytes = device_bytes  # of one device; 0: not known
        self.workers: list[Process[RolloutWorker]] = []
        self.watch: Watch | None = None
        self.nodes: list[str] = []  # Ray's node id of each worker
        self.sender: tuple[str, ActorProxy[Sender]] | None = None  # Ray's node id, actor

    def start(self, launcher: Launcher, seats: Sequence[Seat] = (), report: ReportEvent = unreported) -> None:
        """Start every replica on its seat. Processes of engines that are replaced later are reported."""
        self.report = report
        self.workers = [
            launcher.launch(
                Hosting(seat, concurrency=1000),
                RolloutWorker,
                replace(spec, engine=spec.engine.on(seat)),
                self.queue.handle(),
            )
            for spec, seat in zip(self.specs, seats or [Seat()] * len(self.specs), strict=True)
        ]
        self.watch = launcher.watch(
            {spec.engine.name: each for spec, each in zip(self.specs, self.workers, strict=True)}
        )
        self.starting = [worker.call(RolloutWorker.start) for worker in self.workers]

    def ready(self) -> None:
        """Wait until every replica can generate."""
        timeout_s = max(spec.engine.start_timeout_s for spec in self.specs) + START_GRACE_S
        self.nodes = results(
            self.starting, timeout_s, "starting the rollout engines", died=EngineError, watch=self.watch
        )

    def use_teachers(self, routes: TeacherRoutes) -> None:
        """Have every row scored by its teacher from now on."""
        self.has_teachers = True  # which rows are scored together follows from the split
        calls = [worker.call(RolloutWorker.use_teachers, routes, i) for i, worker in enumerate(self.workers)]
        results(
            calls, self.timeout_s, "telling the rollout workers of the teachers", died=EngineError, watch=self.watch
        )

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        """Sample these (order, prompt) pairs; returns when every group is in the queue."""
        self.shared_engines.be_awake()
        uids = [prompt.uid for _, prompt in prompts]
        dispatcher: Dispatcher[tuple[int, Prompt], RolloutReport] = Dispatcher(
            start=lambda replica, share: self.workers[replica].call(RolloutWorker.generate, share, task),
            num_replicas=len(self.workers),
            room=self._room(task),
            timeout_s=self.timeout_s,
            missing=partial(self._missing, uids, task.partition),
            watch=self.watch,
        )
        report = RolloutReport.join(dispatcher.run(prompts))
        for each in report.incidents:
            self.report(ProcessReplaced(task.step, each.process, each.what))
        return report

    def _room(self, task: Assignment) -> int:
        """Groups that one replica has under way; 0: all of its share at once, so that the split is reproducible."""
        spec, known = self.specs[0], capabilities_of(self.specs[0].backend)
        is_reproducible = spec.engine.deterministic and known is not None and known.deterministic
        if is_reproducible or self.has_teachers or len(self.workers) == 1:
            return 0
        sessions = spec.max_sessions or spec.engine.max_running
        return max(1, sessions // task.num_sessions)

    def load_weights(self, source: WeightSource, probe: Probe | None = None) -> float | None:
        """Load the weights into every engine; returns when all of them use the new version.

        With a probe, returns the largest difference between an engine's log-probabilities and the trainer's.

        Engines that slept get the new weights before their cache, which needs most of the memory.
        """
        self.shared_engines.be_awake(cache=False)
        at_once = probe if self.shared_engines.is_wholly_awake else None  # a second call to each engine is saved
        calls = [
            worker.call(RolloutWorker.load_weights, each, at_once)
            for worker, each in zip(self.workers, self._sources(source), strict=True)
        ]
        found = results(
            calls, self.timeout_s, f"loading weights of version {source.version}", died=EngineError, watch=self.watch
        )
        if probe is not None and at_once is None:
            self.shared_engines.be_awake()
            checks = [worker.call(RolloutWorker.verify, probe) for worker in self.workers]
            found = results(
                checks, self.timeout_s, "comparing the engines with the trainer", died=EngineError, watch=self.watch
            )
        return None if probe is None else max(found)

    def sleep(self) -> None:
        calls = [worker.call(RolloutWorker.sleep) for worker in self.workers]
        self._results(calls, "putting the rollout engines to sleep")

    def wake(self, *, cache: bool) -> None:
        calls = [worker.call(RolloutWorker.wake, cache=cache) for worker in self.workers]
        self._results(calls, "waking the rollout engines")

    def held_bytes(self) -> int:
        """Device memory of the engine that holds most, on each of its devices."""
        calls = [worker.call(RolloutWorker.held_bytes) for worker in self.workers]
        found = self._results(calls, "counting the engines' memory")
        share = int(self.specs[0].engine.memory_fraction * self.device_bytes)
        return max((share if each is None else each for each in found), default=0)

    def _results(self, calls: Sequence[Call[T]], what: str, timeout_s: float | None = None) -> list[T]:
        return results(calls, timeout_s or self.timeout_s, what, died=EngineError, watch=self.watch)

    def _sources(self, source: WeightSource) -> list[WeightSource]:
        """The source for each replica: unchanged if it can read the folder, otherwise with a `sender`.

        Those that receive over a process group are one party, so that the sender sends every byte once.
        """
        remote = [not self._can_read(source, *each) for each in zip(self.specs, self.nodes, strict=True)]
        if not any(remote):
            return [source] * len(self.specs)
        from tqppo.weights.ray_sender import RaySenderClient

        named = tuple(spec.engine.name for spec, is_remote in zip(self.specs, remote, strict=True) if is_remote)
        party = Party(f"v{source.version}-{secrets.token_hex(8)}", named)
        home = source.node or next(node for node, is_remote in zip(self.nodes, remote, strict=True) if is_remote)
        sent = replace(source, sender=RaySenderClient(self._sender_on(home)), party=party)
        return [sent if is_remote else source for is_remote in remote]

    def _can_read(self, source: WeightSource, spec: RolloutSpec, node: str) -> bool:
        return source.node in ("", node) and is_local(spec.engine.endpoint) and spec.weight_sync != "broadcast"

    def _sender_on(self, node: str) -> ActorProxy[Sender]:
        from tqppo.weights.ray_sender import start_sender

        if self.sender is None or self.sender[0] != node:
            self._stop_sender()
            self.sender = (node, start_sender(node, len(self.specs)))
        return self.sender[1]

    def _stop_sender(self) -> None:
        if self.sender is not None:
            from tqppo.weights.ray_sender import stop_sender

            stop_sender(self.sender[1])
            self.sender = None

    def close(self) -> None:
        """Close every replica, and kill those that do not close in time."""
        close_all(self.workers, RolloutWorker.close, CLOSE_TIMEOUT_S, watch=self.watch)
        self.workers = []
        self._stop_sender()

    def _missing(self, uids: Sequence[str], partition: str) -> str:
        known = set(self.queue.list(partition, where={"is_prompt": True}).keys)
        missing = [uid for uid in uids if uid not in known]
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return (
            f"{len(missing)} of {len(uids)} prompts are missing: {shown}. Raise rollout.timeout_s if the engine is "
            "merely slow; its log is in the run's folder"
        )


def is_local(endpoint: str) -> bool:
    """Whether an engine runs on its worker's node. Engines that the worker starts have no endpoint and always do."""
    host = urlsplit(endpoint).hostname or "localhost"
    return host == "localhost" or host.startswith("127.") or host == "::1"
