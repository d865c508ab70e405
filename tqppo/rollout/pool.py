"""The replicas of the rollout engine as the driver sees them: dispatch prompts, wait, load weights."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import ray
from ray.actor import ActorProxy

from tqppo.data.prompts import Prompt
from tqppo.errors import DeadlineExceeded, EngineError
from tqppo.protocols import WeightSource
from tqppo.queue.client import Queue
from tqppo.ray_calls import call, close_all, results
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.teachers.client import TeacherRoutes
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.worker import RolloutSpec, RolloutWorker
from tqppo.seats import Seat
from tqppo.turns import EngineParty, Turn
from tqppo.weights.send import Sender, SenderClient, start_sender, stop_sender
from tqppo.weights.verify import Probe

Groups = Sequence[tuple[int, Prompt]]  # prompts with their place in the step

START_GRACE_S = 60.0  # for Ray to start a process, on top of the engine's own deadline
CLOSE_TIMEOUT_S = 30.0


class RolloutPool:
    """One Ray actor per replica. Whole groups go to the replicas in turn if the split must be reproducible, as for
    deterministic engines and for the chunks that teachers score; otherwise to the replica with the fewest."""

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
        self.party = EngineParty(self, turn)
        self.has_fixed_split = spec.engine.deterministic
        self.device_bytes = device_bytes  # of one device; 0: not known
        self.workers: list[ActorProxy[RolloutWorker]] = []
        self.nodes: list[str] = []  # Ray's node id of each worker
        self.sender: tuple[str, ActorProxy[Sender]] | None = None  # Ray's node id, actor

    def start(self, seats: Sequence[Seat] = ()) -> None:
        """Start every replica on its seat."""
        make = ray.remote(RolloutWorker)
        self.workers = [
            make.options(**seat.options(), max_concurrency=1000).remote(
                replace(spec, engine=spec.engine.on(seat)), self.queue
            )
            for spec, seat in zip(self.specs, seats or [Seat()] * len(self.specs), strict=True)
        ]
        self.starting = [call(worker, RolloutWorker.start) for worker in self.workers]

    def ready(self) -> None:
        """Wait until every replica can generate."""
        timeout_s = max(spec.engine.start_timeout_s for spec in self.specs) + START_GRACE_S
        self.nodes = results(self.starting, timeout_s, "starting the rollout engines", died=EngineError)

    def use_teachers(self, routes: TeacherRoutes) -> None:
        """Have every row scored by its teacher from now on."""
        calls = [call(worker, RolloutWorker.use_teachers, routes, i) for i, worker in enumerate(self.workers)]
        results(calls, self.timeout_s, "telling the rollout workers of the teachers", died=EngineError)
        self.has_fixed_split = True

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        """Sample these (order, prompt) pairs; returns when every group is in the queue."""
        self.party.be_awake()
        uids = [prompt.uid for _, prompt in prompts]
        missing = partial(self._missing, uids, task.partition)
        if self.has_fixed_split or len(self.workers) == 1:
            return self._generate_in_turn(prompts, task, missing)
        return self._generate_least_loaded(prompts, task, missing)

    def _generate_in_turn(self, prompts: Groups, task: Assignment, missing: Callable[[], str]) -> RolloutReport:
        shares = [prompts[i :: len(self.workers)] for i in range(len(self.workers))]
        assert sum(map(len, shares)) == len(prompts), "a prompt would be lost or sampled twice"
        calls = [
            call(worker, RolloutWorker.generate, share, task)
            for worker, share in zip(self.workers, shares, strict=True)
            if share
        ]
        return RolloutReport.join(results(calls, self.timeout_s, "the rollout", missing=missing, died=EngineError))

    def _generate_least_loaded(self, prompts: Groups, task: Assignment, missing: Callable[[], str]) -> RolloutReport:
        """Each replica has as many groups as it runs at once, and one more; whichever ends one gets the next."""
        most = 1 + -(-self.specs[0].engine.max_running // task.num_sessions)
        waiting, loads = deque(prompts), [0] * len(self.workers)
        running: dict[ray.ObjectRef[RolloutReport], int] = {}
        reports: list[RolloutReport] = []
        deadline = time.monotonic() + self.timeout_s
        while waiting or running:
            while waiting and min(loads) < most:
                place = loads.index(min(loads))
                running[call(self.workers[place], RolloutWorker.generate, [waiting.popleft()], task)] = place
                loads[place] += 1
            done, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise DeadlineExceeded(f"the rollout did not finish within {self.timeout_s:g} s. {missing()}")
            reports += results(done, self.timeout_s, "the rollout", died=EngineError)
            for each in done:
                loads[running.pop(each)] -= 1
        return RolloutReport.join(reports)

    def load_weights(self, source: WeightSource, probe: Probe | None = None) -> float | None:
        """Load the weights into every engine; returns when all of them use the new version.

        With a probe, returns the largest difference between an engine's log-probabilities and the trainer's.

        Engines that slept get the new weights before their cache, which needs most of the memory.
        """
        self.party.be_awake(cache=False)
        calls = [
            call(worker, RolloutWorker.load_weights, self._source_for(source, spec, node))
            for worker, spec, node in zip(self.workers, self.specs, self.nodes, strict=True)
        ]
        results(calls, self.timeout_s, f"loading weights of version {source.version}", died=EngineError)
        if probe is None:
            return None
        self.party.be_awake()
        checks = [call(worker, RolloutWorker.verify, probe) for worker in self.workers]
        return max(results(checks, self.timeout_s, "comparing the engines with the trainer", died=EngineError))

    def sleep(self) -> None:
        calls = [call(worker, RolloutWorker.sleep) for worker in self.workers]
        results(calls, self.timeout_s, "putting the rollout engines to sleep", died=EngineError)

    def wake(self, *, cache: bool) -> None:
        calls = [call(worker, RolloutWorker.wake, cache=cache) for worker in self.workers]
        results(calls, self.timeout_s, "waking the rollout engines", died=EngineError)

    def held_bytes(self) -> int:
        """Device memory of the engine that holds most, on each of its devices."""
        calls = [call(worker, RolloutWorker.held_bytes) for worker in self.workers]
        found = results(calls, self.timeout_s, "counting the engines' memory", died=EngineError)
        share = int(self.specs[0].engine.memory_fraction * self.device_bytes)
        return max((share if each is None else each for each in found), default=0)

    def _source_for(self, source: WeightSource, spec: RolloutSpec, node: str) -> WeightSource:
        """The weight source for one replica: unchanged if it can read the folder, otherwise with a `sender`."""
        is_readable = source.node in ("", node) and is_local(spec.engine.endpoint)
        if is_readable and spec.weight_sync != "broadcast":
            return source
        home = source.node or node
        if self.sender is None or self.sender[0] != home:
            self._stop_sender()
            self.sender = (home, start_sender(home))
        return replace(source, sender=SenderClient(self.sender[1]))

    def _stop_sender(self) -> None:
        if self.sender is not None:
            stop_sender(self.sender[1])
            self.sender = None

    def close(self) -> None:
        """Close every replica, and kill those that do not close in time."""
        close_all(self.workers, RolloutWorker.close, CLOSE_TIMEOUT_S)
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
