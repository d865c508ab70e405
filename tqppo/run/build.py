"""Builds a run's processes and stages from its config, and takes them down again in reverse order.

Everything that takes long starts together and is waited for at the end. Imported only to train.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from transformers import AutoTokenizer

from tqppo.config import facts
from tqppo.config.placement import placement_of
from tqppo.config.sections import Config
from tqppo.data.dataset import is_procedural
from tqppo.data.prompts import DataSpec, Prompt, Sampler, demonstrations, for_validation
from tqppo.data.prompts import load as load_prompts
from tqppo.device_memory import Ledger
from tqppo.errors import PreflightError
from tqppo.fake_gpus import fake_gpus
from tqppo.metrics.events import IdleGpus, ReportEvent, unreported
from tqppo.placement import TEACHER
from tqppo.queue.client import Queue
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.teachers.pool import TeacherPool
from tqppo.run import configure
from tqppo.run.compose import Processes, StageGroups, make_stages, make_trainer, validation_task
from tqppo.run.configure import RunPaths
from tqppo.run.folder import RunFolder
from tqppo.run.live import LiveRun, Validator
from tqppo.run.placement import Seating, check_resources, take_seats
from tqppo.run.teachers import Announce, prepare_teachers
from tqppo.seats import Seat
from tqppo.tiny.prepare import make_tiny_model
from tqppo.trainers.stages import Clock
from tqppo.turns import Turn, Turns
from tqppo.weights import location
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
W = TypeVar("W", bound=Worker)


def build(
    config: Config,
    folder: RunFolder,
    logs: Path,
    stack: ExitStack,
    announce: Announce,
    *,
    report: ReportEvent = unreported,
) -> LiveRun:
    """Start everything and wait until it is ready; closing `stack` takes it down."""
    seating = seat_processes(config, stack, report)
    paths = prepare_paths(config, folder, logs, stack, announce)
    tokenizer = load_tokenizer(config, paths)
    queue = make_queue(config, stack)
    turns = make_turns(config)
    starter = GroupStarter(queue, seating.seats, turns, stack)
    groups = start_groups(config, paths, starter, special_ids=special_tokens(config, tokenizer))
    if turns.placement.neighbours("rollout"):
        with announce("loading the model into its workers"):
            starter.ready()
        turns.make_room("rollout")  # engines size their cache by the memory that is free when they start
    pool = start_pool(config, paths, queue, tokenizer, stack, seating, turns)
    teachers = start_teachers(config, paths, queue, len(tokenizer), stack, seating)
    estimator = RemoteEstimator(
        configure.estimator_spec(config, paths), queue, timeout_s=config.storage.timeout_s + 60, seat=seating.home
    )
    sampler = make_sampler(config, tokenizer, announce)
    clock = Clock()
    validator = Validator(pool, queue, clock, validation_prompts(config, tokenizer), validation_task(config))
    with announce("loading the model into its workers"):
        starter.ready()
        estimator.ready(START_TIMEOUT_S)
    with announce(f"starting the {config.rollout.backend} engine"):
        pool.ready()
        turns.join("rollout", pool.party)
        turns.count("rollout")
    if teachers is not None:
        with announce(f"starting the teacher{'s' if len(config.teachers) > 1 else ''}"):
            teachers.ready()
        pool.use_teachers(teachers.routes())
    stages = make_stages(
        config,
        Processes(queue, groups, pool, estimator),
        sampler.next_batch,
        clock,
        trajectories=trajectory_schedule(config, folder),
        vocabulary=len(tokenizer),
        report=report,
    )
    return LiveRun(
        queue, groups.actor, groups.critic, stages, clock, make_trainer(config, stages), sampler, validator, teachers
    )


# -- the model ---------------------------------------------------------------------------------------------------------


def prepare_paths(config: Config, folder: RunFolder, logs: Path, stack: ExitStack, announce: Announce) -> RunPaths:
    """Find or make the models of the run; returns where everything is."""
    with announce("making the model" if config.model.path == "tiny" else "finding the model"):
        model = prepare_model(config, folder.model)
    return RunPaths(
        model=model,
        tokenizer=config.model.tokenizer or model,
        logs=logs,
        publish=publish_folder(stack),
        teachers=prepare_teachers(config, model, folder.scores, announce),
        scores=folder.scores,
    )


def prepare_model(config: Config, folder: Path) -> str:
    """The model's folder or hub name; a tiny model is made, and warmed up, in a process of its own."""
    if config.model.path != "tiny":
        return config.model.path
    task = ray.remote(num_cpus=0)(make_tiny_model)
    shown = partial(demonstrations, DataSpec.of(config.data), seed=config.run.seed)
    return ray.get(task.remote(str(folder.resolve()), configure.tiny_model_spec(config), shown))


def load_tokenizer(config: Config, paths: RunPaths) -> Any:
    try:
        return AutoTokenizer.from_pretrained(paths.tokenizer, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(
            f"the tokenizer of {paths.tokenizer!r} cannot be loaded: {reason}\n"
            "model.path is a folder in Hugging Face's layout, a hub name (which needs the network), or tiny"
        ) from None


def special_tokens(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Special tokens, except those that end an answer."""
    endings = {*eos_tokens(tokenizer), *config.rollout.stop_token_ids}
    return tuple(sorted({int(token) for token in tokenizer.all_special_ids} - endings))


def eos_tokens(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


# -- processes ---------------------------------------------------------------------------------------------------------


def seat_processes(config: Config, stack: ExitStack, report: ReportEvent) -> Seating:
    """Reserve the GPUs of the plan, and report those of the cluster that it leaves idle."""
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    check_resources(config, [node["Resources"] for node in nodes() if node["Alive"]])
    seating = take_seats(config, fake=fake_gpus() is not None)
    stack.callback(seating.close)
    idle = len(placement_of(config).idle)
    if idle or seating.num_unused > 0:
        report(IdleGpus(0, idle, max(0, seating.num_unused)))
    return seating


def make_queue(config: Config, stack: ExitStack) -> Queue:
    storage = config.storage
    queue = Queue.create(
        storage.backend, budget_bytes=int(storage.budget_gb * 2**30), timeout_s=storage.timeout_s, dir=storage.dir
    )
    stack.callback(queue.close)
    return queue


def make_turns(config: Config) -> Turns:
    """The turns of roles that share GPUs. Fake GPUs count what is on them; real ones do so themselves."""
    placement, fake = placement_of(config), fake_gpus()
    return Turns(placement, Ledger(placement, fake.memory_bytes) if fake else None)


class StartGroup(Protocol):
    """Starts the worker group of a role with so many ranks."""

    def __call__(self, role: str, worker_class: type[W], spec: RoleSpec, ranks: int) -> Group[W]: ...


@dataclass(frozen=True)
class GroupStarter:
    """Starts worker groups as Ray actors without waiting for them; `ready` waits for all, `stack` closes them."""

    queue: Queue
    seats: Mapping[str, Sequence[Seat]]
    turns: Turns
    stack: ExitStack
    starting: dict[str, WorkerGroup[Any]] = field(default_factory=dict)

    def __call__(self, role: str, worker_class: type[W], spec: RoleSpec, ranks: int) -> Group[W]:
        group = WorkerGroup(
            role,
            worker_class,
            ranks=ranks,
            spec=spec,
            queue=self.queue,
            seats=self.seats[role],
            turn=Turn(role, self.turns),
        )
        self.stack.callback(group.close)
        group.start()
        self.starting[role] = group
        return group

    def ready(self) -> None:
        """Wait until every rank of every group that was started has its model."""
        while self.starting:
            role, group = self.starting.popitem()
            group.ready()
            self.turns.join(role, group)
            self.turns.count(role)


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


def start_pool(
    config: Config, paths: RunPaths, queue: Queue, tokenizer: Any, stack: ExitStack, seating: Seating, turns: Turns
) -> RolloutPool:
    fake = fake_gpus()
    pool = RolloutPool(
        configure.rollout_spec(config, paths, eos_tokens(tokenizer)),
        queue,
        endpoints=config.rollout.endpoints,
        replicas=config.rollout.replicas,
        timeout_s=config.rollout.timeout_s,
        turn=Turn("rollout", turns),
        device_bytes=fake.memory_bytes if fake else 0,
    )
    stack.callback(pool.close)
    pool.start(seating.seats["rollout"])
    return pool


def start_teachers(
    config: Config, paths: RunPaths, queue: Queue, vocabulary: int, stack: ExitStack, seating: Seating
) -> TeacherPool | None:
    """The teachers of the config, starting; None in modes without."""
    setups = [
        replace(setup, seats=tuple(seating.seats[f"{TEACHER}{setup.spec.name}"]))
        for setup in configure.teacher_setups(config, paths, vocabulary=vocabulary)
    ]
    if not setups:
        return None
    teachers = TeacherPool(setups, queue, configure.teacher_routing(config))
    stack.callback(teachers.close)
    teachers.start()
    return teachers


def publish_folder(stack: ExitStack) -> str:
    """Where the actor publishes weights; the folders of dead runs are removed first."""
    location.remove_abandoned()
    folder = location.new_folder()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def trajectory_schedule(config: Config, folder: RunFolder) -> Callable[[int], Path | None]:
    every = config.logging.trajectories
    return lambda step: folder.trajectories / f"step_{step:06d}.jsonl" if every and step % every == 0 else None


def make_sampler(config: Config, tokenizer: Any, announce: Announce) -> Sampler:
    """The training prompts. Files are read through once, so that an overlong prompt is found now, not at step 700."""
    prompts = load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed)
    if config.data.overlong == "error" and not all(is_procedural(each) for each in facts.data_sources(config)):
        with announce("checking the prompts"):
            prompts.check()
    return Sampler(prompts)


# -- validation --------------------------------------------------------------------------------------------------------


def validation_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    data, sources = DataSpec.of(config.data), config.validation.data
    held_out = for_validation(data, tokenizer, seed=config.run.seed, sources=sources)
    return held_out.first(config.validation.num_prompts) if held_out else []
