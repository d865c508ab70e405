"""The replicas of the rollout engine, seen from the driver: dispatch prompts, wait, load weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import ray

from tqppo.data.prompts import Prompt
from tqppo.errors import EngineError
from tqppo.protocols import WeightSource
from tqppo.queue.client import Queue
from tqppo.ray_calls import results
from tqppo.rollout.worker import Assignment, Probe, RolloutSpec, RolloutWorker
from tqppo.weights.send import SenderClient, start_sender, stop_sender


class RolloutPool:
    """One Ray actor per replica. Prompts are spread by whole groups, in turn, so that the split is reproducible."""

    def __init__(self, spec: RolloutSpec, queue: Queue, *, endpoints: Sequence[str], replicas: int, timeout_s: float):
        self.specs = [
            replace(spec, engine=replace(spec.engine, name=f"rollout-{i}", endpoint=endpoint))
            for i, endpoint in enumerate(endpoints or [""] * replicas)
        ]
        self.queue = queue
        self.timeout_s = timeout_s
        self.workers: list[Any] = []
        self.nodes: list[str] = []  # of each worker, in Ray's names
        self.sender: tuple[str, Any] | None = None  # node, actor

    def start(self, *, cpus: float = 1.0, gpus: float = 0.0) -> None:
        remote = ray.remote(RolloutWorker)
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 1000}
        self.workers = [remote.options(**options).remote(spec, self.queue) for spec in self.specs]
        self.starting = [worker.start.remote() for worker in self.workers]

    def ready(self) -> None:
        """Wait until every replica can generate."""
        deadline = max(spec.engine.start_timeout_s for spec in self.specs) + 60
        self.nodes = results(self.starting, deadline, "starting the rollout engines", died=EngineError)

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> None:
        """Sample these (order, prompt) pairs; every group is in the queue afterwards, or this raises."""
        shares = [prompts[i :: len(self.workers)] for i in range(len(self.workers))]
        assert sum(map(len, shares)) == len(prompts), "a prompt would be lost or sampled twice"
        calls = [
            worker.generate.remote(share, task) for worker, share in zip(self.workers, shares, strict=True) if share
        ]
        uids = [prompt.uid for _, prompt in prompts]
        missing = partial(self._missing, uids, task.partition)
        results(calls, self.timeout_s, "the rollout", missing=missing, died=EngineError)

    def load_weights(self, source: WeightSource, probe: Probe | None = None) -> None:
        calls = [
            worker.load_weights.remote(self._for(source, spec, node), probe)
            for worker, spec, node in zip(self.workers, self.specs, self.nodes, strict=True)
        ]
        results(calls, self.timeout_s, f"loading weights of version {source.version}", died=EngineError)

    def _for(self, source: WeightSource, spec: RolloutSpec, node: str) -> WeightSource:
        """The source as it is to an engine that can open its folder, else with somebody to ask for it."""
        is_reachable = source.node in ("", node) and is_local(spec.engine.endpoint)
        if is_reachable and spec.weight_sync != "broadcast":
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
        """End every replica, in peace if it answers and by force otherwise."""
        calls = [worker.close.remote() for worker in self.workers]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=30)
        for worker in self.workers:
            ray.kill(worker)
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
    """Whether a server that already runs is on its worker's node; started ones always are."""
    host = urlsplit(endpoint).hostname or "localhost"
    return host == "localhost" or host.startswith("127.") or host == "::1"
