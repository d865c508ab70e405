"""Small stand-ins for what the stages of a step call: they keep rows in a real queue and write declared columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tqppo import dataflow
from tqppo.columns import Kind, column
from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of
from tqppo.config.sections import Config
from tqppo.data.prompts import Prompt
from tqppo.dataflow import Features, Stage
from tqppo.devices.memory import MemoryLedger
from tqppo.devices.turns import DeviceTurns, SharedEngines, Turn
from tqppo.processes.in_order import InOrder
from tqppo.protocols import Metrics, WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.rollout.teachers.figures import RolloutReport, TeacherFigures
from tqppo.rollout.writer import group_marker
from tqppo.run import configure
from tqppo.run.compose import Processes, make_stages, make_trainer
from tqppo.run.configure import RunPaths
from tqppo.run.processes import start_groups
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import Stages, Trainer
from tqppo.workers.process.bridge import stage_of
from tqppo.workers.specs import RoleSpec

PROMPT, RESPONSE = 3, 2  # tokens


@dataclass
class Log:
    """What happened in a step, in order: calls by name, and each stage's columns."""

    calls: list[str] = field(default_factory=list)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    writes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)  # calls, and who leaves and returns between them


@dataclass
class FakeGroup:
    """A worker group that computes nothing: it reads a stage's columns from the queue and writes zeros."""

    role: str
    queue: Queue
    features: Features
    log: Log
    metrics: Metrics = field(default_factory=dict)  # what an update returns besides its number of mini-batches
    before_update: Callable[[BatchMeta], object] = len
    turn: Turn = field(default_factory=Turn)
    size: int = 0  # bytes on each device while it is there
    is_away: bool = False

    def rest(self) -> None:
        self.log.turns.append(f"{self.role} rests")
        self.is_away = True

    def resume(self) -> None:
        self.log.turns.append(f"{self.role} resumes")
        self.is_away = False

    def held_bytes(self) -> int:
        return 0 if self.is_away else self.size

    def call(self, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        self.turn.take()
        self.log.turns.append(f"{self.role}.{method.__name__}")
        self.log.calls.append(f"{self.role}.{method.__name__}")
        return WeightSource("nowhere", arguments[0]) if method.__name__ == "publish" else None

    def add_columns(self, method: Callable[..., Any], batch: BatchMeta) -> BatchMeta:
        stage = self._read(method, batch)
        written = stage.writes(self.features)
        self.log.writes[stage.name] = written
        rows = [(tags["prompt_len"], tags["response_len"]) for tags in batch.tags]
        return self.queue.put(batch, {name: zeros(name, rows) for name in written})

    def update(self, method: Callable[..., Any], batch: BatchMeta, *, step: int, num_mini_batches: int) -> Metrics:
        stage = self._read(method, batch)
        self.before_update(batch)
        self.log.writes[stage.name] = ()
        return {f"{self.role}/mini_batches": float(num_mini_batches), **self.metrics}

    def _read(self, method: Callable[..., Any], batch: BatchMeta) -> Stage:
        stage = stage_of(method)
        self.turn.take()
        self.log.turns.append(stage.name)
        self.log.calls.append(stage.name)
        self.log.reads[stage.name] = stage.reads(self.features)
        self.queue.get(batch, stage.reads(self.features))
        return stage


def zeros(name: str, rows: Sequence[tuple[int, int]]) -> Any:
    """A column of zeros for rows of these prompt and response lengths."""
    declared = column(name)
    dtype = torch.float32 if declared.dtype == "any" else getattr(torch, declared.dtype)
    if declared.kind is Kind.ROW:
        return torch.zeros(len(rows), dtype=dtype)
    lengths = [prompt + response if declared.kind is Kind.SEQUENCE else response for prompt, response in rows]
    return Jagged(torch.zeros(sum(lengths), *(4 for _ in declared.trailing), dtype=dtype), lengths)


@dataclass
class FakeEngines:
    """Engines that answer every session with the same tokens; the reward is the session's number."""

    queue: Queue
    features: Features
    group_size: int
    log: Log
    turn: Turn = field(default_factory=Turn)
    sizes: tuple[int, int] = (0, 0)  # bytes on each device of weights and cache
    version: int = 0

    def __post_init__(self) -> None:
        self.shared_engines = SharedEngines(self, self.turn)

    def sleep(self) -> None:
        self.log.turns.append("engines sleep")

    def wake(self, *, cache: bool) -> None:
        self.log.turns.append("engines wake" if cache else "engines wake with weights")

    def held_bytes(self) -> int:
        return sum(
            size
            for name, size in zip(("weights", "cache"), self.sizes, strict=True)
            if name in self.shared_engines.awake
        )

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Any) -> RolloutReport:
        stage = dataflow.GENERATE
        self.shared_engines.be_awake()
        self.log.turns.append(stage.name)
        self.log.calls.append(stage.name)
        self.log.reads[stage.name] = stage.reads(self.features)
        self.log.writes[stage.name] = stage.writes(self.features)
        for order, prompt in prompts:
            rows = range(self.group_size)
            tags = [self._tags(prompt.uid, order, session) for session in rows]
            columns = {name: zeros(name, [(PROMPT, RESPONSE)] * len(tags)) for name in stage.writes(self.features)}
            columns["response_mask"] = Jagged(
                torch.ones(len(tags) * RESPONSE, dtype=torch.bool), [RESPONSE] * len(tags)
            )
            columns["reward"] = torch.arange(float(self.group_size))
            self.queue.put([f"{prompt.uid}_{session}_0" for session in rows], columns, tags=tags)
            self.queue.tag({prompt.uid: group_marker(order, len(tags), [], [])})
        taught = {"t": TeacherFigures(requests=1, rows=len(prompts) * self.group_size)}
        return RolloutReport(taught if self.features.has_teachers else {})

    def _tags(self, uid: str, order: int, session: int) -> dict[str, Any]:
        lengths = {"prompt_len": PROMPT, "response_len": RESPONSE, "seq_len": PROMPT + RESPONSE}
        identity = {"uid": uid, "session": session, "trajectory": 0, "order": order}
        return {**identity, **lengths, "reward": float(session), "turns": 1, "weight_version": self.version}

    def load_weights(self, source: WeightSource, probe: Any = None) -> None:
        self.shared_engines.be_awake(cache=False)
        self.version = source.version
        self.log.calls.append(f"load version {source.version}")
        self.log.turns.append(f"load version {source.version}")


@dataclass
class FakeEstimator:
    queue: Queue
    features: Features
    log: Log

    def estimate(self, batch: BatchMeta, kl_coef: float) -> tuple[tuple[str, ...], Metrics]:
        stage = dataflow.ESTIMATE
        self.log.calls.append(stage.name)
        self.log.reads[stage.name] = stage.reads(self.features)
        self.log.writes[stage.name] = stage.writes(self.features)
        self.queue.get(batch, stage.reads(self.features))
        rows = [(tags["prompt_len"], tags["response_len"]) for tags in batch.tags]
        self.queue.put(batch, {name: zeros(name, rows) for name in stage.writes(self.features)})
        return stage.writes(self.features), {"actor/reward_kl_penalty": 0.5} if self.features.kl_in_reward else {}

    def write_trajectories(self, batch: BatchMeta, path: Path) -> None:
        self.log.calls.append(f"write {path.name}")


@dataclass
class FakeRun:
    """A run whose stages and trainer are the real ones, and whose processes are the fakes above.

    `roles` are the worker groups that building the run started, with their ranks."""

    config: Config
    queue: Queue
    log: Log
    clock: Clock
    stages: Stages
    trainer: Trainer
    roles: dict[str, int]
    actor: FakeGroup
    turns: DeviceTurns


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, and what is on it: of each role's rank, and of an engine's weights and cache."""

    device: int = 0
    roles: Mapping[str, int] = field(default_factory=dict)
    engine: tuple[int, int] = (0, 0)


@dataclass
class FakePrompts:
    """Prompts p0, p1 and so on."""

    drawn: int = 0

    def next_batch(self, num_prompts: int) -> list[Prompt]:
        first, self.drawn = self.drawn, self.drawn + num_prompts
        return [Prompt(f"p{i}", i, [1] * PROMPT, "", "task", {}, "") for i in range(first, self.drawn)]

    def metrics(self) -> Metrics:
        return {"drawn": float(self.drawn)}


def fake_run(
    queue: Queue,
    preset: str | None,
    *overrides: str,
    engines: type[FakeEngines] = FakeEngines,
    memory: Memory | None = None,
    ahead: InOrder | None = None,
    **options: Any,
) -> FakeRun:
    compilation = compile_config(preset, [], list(overrides), {})
    assert compilation.config is not None, compilation.diagnostics
    config = compilation.config
    features, log, clock = facts.features(config), Log(), Clock()
    paths = RunPaths(
        "model", "tokenizer", Path("logs"), "published", {name: each.path for name, each in config.teachers.items()}
    )
    roles: dict[str, int] = {}

    placement, held = placement_of(config), memory or Memory()
    turns = DeviceTurns(placement, MemoryLedger(placement, held.device) if memory else None)

    def start(role: str, worker_class: type, spec: RoleSpec, ranks: int) -> Any:
        roles[role] = ranks
        group = FakeGroup(role, queue, spec.features, log, turn=Turn(role, turns), size=held.roles.get(role, 0))
        turns.join(role, group)
        return group

    groups = start_groups(config, paths, start)
    turns.make_room("rollout")
    for setup in configure.teacher_setups(config, paths, vocabulary=256):
        roles[f"teacher {setup.spec.name}"] = len(setup.specs())
    made = engines(queue, features, config.rollout.group_size, log, Turn("rollout", turns), held.engine)
    turns.join("rollout", made.shared_engines)
    turns.count("rollout")
    estimator = FakeEstimator(queue, configure.estimator_spec(config, paths).features, log)
    processes = Processes(queue, groups, made, estimator, ahead)
    stages = make_stages(config, processes, FakePrompts(), clock, vocabulary=256, **options)
    return FakeRun(config, queue, log, clock, stages, make_trainer(config, stages), roles, groups.actor, turns)
