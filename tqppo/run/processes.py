"""Starts the processes of a run on their seats, in the order that their GPUs ask for; `build` puts them together.

Everything that takes long starts at once and is waited for at the end, except engines that share GPUs with trainers:
they start last, and find the GPUs empty.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tqppo.config import facts
from tqppo.config.placement import placement_of
from tqppo.config.sections import Config
from tqppo.devices.fake_gpus import fake_gpus
from tqppo.devices.memory import MemoryLedger
from tqppo.devices.placement import TEACHER
from tqppo.devices.turns import DeviceTurns, Turn
from tqppo.metrics.events import IdleGpus, ReportEvent, unreported
from tqppo.processes.hosting import Launcher
from tqppo.queue.client import Queue
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.teachers.pool import TeacherPool
from tqppo.run import configure
from tqppo.run.compose import StageGroups
from tqppo.run.configure import RunPaths
from tqppo.run.placement import Seating, check_resources, node_resources, seats_without_devices, take_seats
from tqppo.run.teachers import Announce
from tqppo.workers.actor import Actor
from tqppo.workers.compute.worker import Worker
from tqppo.workers.critic import Critic
from tqppo.workers.estimator import RemoteEstimator
from tqppo.workers.process.group import Group, WorkerGroup
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel
from tqppo.workers.specs import RoleSpec
from tqppo.workers.student import Student

START_TIMEOUT_S = 600.0
LOADING = "loading the model into its workers"
W = TypeVar("W", bound=Worker)


def seat_processes(config: Config, stack: ExitStack, report: ReportEvent) -> Seating:
    """Reserve the GPUs of the plan, and report those of the cluster that it leaves idle."""
    if config.cluster.in_process:
        return seats_without_devices(config)
    check_resources(config, node_resources())
    seating = take_seats(config, fake=fake_gpus() is not None)
    stack.callback(seating.close)
    idle = len(placement_of(config).idle)
    if idle or seating.num_unused > 0:
        report(IdleGpus(0, idle, max(0, seating.num_unused)))
    return seating


def make_turns(config: Config) -> DeviceTurns:
    """The turns of roles that share GPUs. Fake GPUs count what is on them; real ones do so themselves."""
    placement, fake = placement_of(config), fake_gpus(config.cluster.gpu_memory_gb)
    return DeviceTurns(placement, MemoryLedger(placement, fake.memory_bytes) if fake else None)


class StartGroup(Protocol):
    """Starts the worker group of a role with so many ranks."""

    def __call__(self, role: str, worker_class: type[W], spec: RoleSpec, ranks: int) -> Group[W]: ...


def start_groups(
    config: Config, paths: RunPaths, start: StartGroup, *, special_ids: tuple[int, ...] = ()
) -> StageGroups:
    """Start a group for each role that the run has."""
    ranks = facts.worker_roles(config)
    actor_class: type[Actor] = Student if facts.has_teachers(config) else Actor

    def optional(role: str, worker_class: type[W], make_spec: Callable[[], RoleSpec]) -> Group[W] | None:
        return start(role, worker_class, make_spec(), ranks[role]) if role in ranks else None

    return StageGroups(
        actor=start("actor", actor_class, configure.actor_spec(config, paths, special_ids), ranks["actor"]),
        critic=optional("critic", Critic, partial(configure.critic_spec, config, paths)),
        reference=optional("reference", Reference, partial(configure.reference_spec, config, paths)),
        reward_model=optional("reward_model", RewardModel, partial(configure.reward_model_spec, config)),
    )


@dataclass(frozen=True)
class ProcessStarter:
    """Starts processes without waiting for them; `stack` closes them."""

    config: Config
    launcher: Launcher
    paths: RunPaths
    queue: Queue
    seating: Seating
    turns: DeviceTurns
    stack: ExitStack
    report: ReportEvent = unreported
    starting: dict[str, WorkerGroup[Any]] = field(default_factory=dict)

    def group(self, role: str, worker_class: type[W], spec: RoleSpec, ranks: int) -> Group[W]:
        group = WorkerGroup(
            role,
            worker_class,
            ranks=ranks,
            spec=spec,
            queue=self.queue,
            seats=self.seating.seats[role],
            turn=Turn(role, self.turns),
        )
        self.stack.callback(group.close)
        group.start(self.launcher)
        self.starting[role] = group
        return group

    def groups_ready(self) -> None:
        """Wait until every rank of every group that was started has its model."""
        while self.starting:
            role, group = self.starting.popitem()
            group.ready()
            self.turns.join(role, group)
            self.turns.count(role)

    def pool(self, eos_token_ids: tuple[int, ...], announce: Announce) -> RolloutPool:
        """The engines. If trainers share their GPUs, these are waited for first and leave: an engine sizes its cache
        by the memory that is free when it starts."""
        if self.turns.placement.neighbours("rollout"):
            with announce(LOADING):
                self.groups_ready()
                self.turns.make_room("rollout")
        rollout, fake = self.config.rollout, fake_gpus(self.config.cluster.gpu_memory_gb)
        pool = RolloutPool(
            configure.rollout_spec(self.config, self.paths, eos_token_ids),
            self.queue,
            endpoints=rollout.endpoints,
            replicas=rollout.replicas,
            timeout_s=rollout.timeout_s,
            turn=Turn("rollout", self.turns),
            device_bytes=fake.memory_bytes if fake else 0,
        )
        pool.report = self.report
        self.stack.callback(pool.close)
        pool.start(self.launcher, self.seating.seats["rollout"], self.report)
        return pool

    def pool_ready(self, pool: RolloutPool) -> None:
        pool.ready()
        self.turns.join("rollout", pool.shared_engines)
        self.turns.count("rollout")

    def teachers(self, vocabulary: int) -> TeacherPool | None:
        """The teachers of the config; None in modes without."""
        setups = [
            replace(setup, seats=tuple(self.seating.seats[f"{TEACHER}{setup.spec.name}"]))
            for setup in configure.teacher_setups(self.config, self.paths, vocabulary=vocabulary)
        ]
        if not setups:
            return None
        teachers = TeacherPool(setups, self.queue, configure.teacher_routing(self.config))
        self.stack.callback(teachers.close)
        teachers.start(self.launcher)
        return teachers

    def teachers_ready(self, teachers: TeacherPool) -> None:
        """Wait for the teachers. They have GPUs of their own and never leave them, so they are counted once."""
        teachers.ready()
        if (ledger := self.turns.ledger) is None:
            return
        for name, num_bytes in teachers.held_bytes(ledger.memory_bytes).items():
            ledger.write(f"{TEACHER}{name}", num_bytes)

    def estimator(self) -> RemoteEstimator:
        """Start the estimator on the node of the trainer's first GPU, which has most of the columns that it reads."""
        spec, timeout_s = configure.estimator_spec(self.config, self.paths), self.config.storage.timeout_s + 60
        return RemoteEstimator(spec, self.queue, timeout_s=timeout_s, launcher=self.launcher, seat=self.seating.home)
