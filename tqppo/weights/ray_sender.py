"""The sender of weights as a Ray actor. The rollout pool starts it when an engine cannot read the published file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorProxy
from ray.exceptions import RayError, RayTaskError

from tqppo.processes.ray_calls import call, kill
from tqppo.weights.send import Sender, WeightSenderCalls, failed_to

P = ParamSpec("P")
T = TypeVar("T")
CALLS_OF_ENGINE = 4  # at the same time, most of which wait for the other engines


@dataclass(frozen=True)
class RaySenderClient(WeightSenderCalls):
    """Talks to a sender that is a Ray actor."""

    actor: ActorProxy[Sender]

    async def _ask(self, method: Callable[Concatenate[Sender, P], T], *args: P.args, **named: P.kwargs) -> T:
        try:
            return await call(self.actor, method, *args, **named)
        except RayError as error:
            raise failed_to(method, error.cause if isinstance(error, RayTaskError) else error) from error


def start_sender(node: str, num_engines: int) -> ActorProxy[Sender]:
    """Start a sender on a Ray node. It sees the node's GPUs, but reserves none."""
    placed = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    options = {"num_cpus": 0, "max_concurrency": 16 + CALLS_OF_ENGINE * num_engines, "max_restarts": 3}
    return ray.remote(Sender).options(**options, scheduling_strategy=placed, runtime_env=environment).remote()


def stop_sender(sender: ActorProxy[Sender]) -> None:
    with contextlib.suppress(RayError):
        kill(sender)
