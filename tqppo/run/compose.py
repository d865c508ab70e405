"""Puts a run's stages together from its config and the processes that compute them. `build` starts those processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tqppo import dataflow, plugins
from tqppo.algorithms.kl import Controller
from tqppo.config import facts
from tqppo.config.placement import runs_at_once
from tqppo.config.sections import Config
from tqppo.data.prompts import Prompt
from tqppo.metrics.events import ReportEvent, unreported
from tqppo.processes.in_order import InOrder
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.run import configure
from tqppo.trainers.ahead import PromptsInFlight, RolloutAhead
from tqppo.trainers.groups import CollectorOptions, GroupCollector
from tqppo.trainers.side_by_side import Clock, SideBySide
from tqppo.trainers.stages import (
    ActorStage,
    AdvantageStage,
    CriticStage,
    Engines,
    EstimatorProcess,
    PaddingStage,
    ReferenceStage,
    RewardModelStage,
    Rollout,
    RolloutStage,
    Stages,
    Trainer,
)
from tqppo.weights.verify import Probe
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.process.group import Group
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel

PROBE_TOKENS = 32
# How far the log-probability of any token may be from the trainer's after a weight sync: rounding explains less.
SYNC_TOLERANCE = 0.05  # in float32
ROUGH_SYNC_TOLERANCE = 1.0  # in smaller types


@dataclass(frozen=True)
class StageGroups:
    """The worker group of each role that the run has."""

    actor: Group[Actor]
    critic: Group[Critic] | None = None
    reference: Group[Reference] | None = None
    reward_model: Group[RewardModel] | None = None


class PromptSource(Protocol):
    """The training prompts in their order. Implemented by `data.prompts.Sampler`."""

    def next_batch(self, num_prompts: int) -> list[Prompt]: ...
    def metrics(self) -> Metrics: ...


@dataclass(frozen=True)
class Processes:
    """What computes the stages. `ahead` does the engines' work, where they sample ahead of training."""

    queue: Queue
    groups: StageGroups
    engines: Engines
    estimator: EstimatorProcess
    ahead: InOrder | None = None


def make_stages(
    config: Config,
    processes: Processes,
    prompts: PromptSource,
    clock: Clock,
    *,
    trajectories: Callable[[int], Path | None] = lambda step: None,
    vocabulary: int,
    report: ReportEvent = unreported,
) -> Stages:
    """Every stage of the run, from its config and the processes that compute it."""
    queue, groups = processes.queue, processes.groups
    probe = make_probe(config, groups.actor, vocabulary) if facts.verifies_weights(config) else lambda: None
    features = facts.features(config)
    critic = groups.critic
    return Stages(
        queue=queue,
        rollout=make_rollout(
            config,
            processes,
            RolloutStage(
                processes.engines,
                GroupCollector(queue, prompts.next_batch, collector_options(config), report),
                clock,
                assignment=training_task(config),
                num_prompts=config.data.batch_size,
                probe=probe,
                drawn=prompts.metrics,
            ),
        ),
        reward_model=RewardModelStage(groups.reward_model, clock),
        padding=PaddingStage(queue, clock, facts.required_multiple(config)),
        actor=ActorStage(groups.actor, clock, features, facts.mini_batch_rows(config, "actor"), report),
        reference=ReferenceStage(groups.reference, groups.actor, clock, features),
        critic=None if critic is None else CriticStage(critic, clock, facts.mini_batch_rows(config, "critic")),
        advantages=AdvantageStage(
            processes.estimator,
            clock,
            features,
            kl_controller(config),
            trajectories,
            skips_on_full_disk=config.checkpoint.on_full_disk == "continue",
            report=report,
        ),
        side_by_side=SideBySide(at_once=runs_at_once(config)),
        critic_only_steps=config.critic.warmup_only_steps,
    )


def make_rollout(config: Config, processes: Processes, stage: RolloutStage) -> Rollout:
    """The rollout stage; with rollout.ahead, its work is done in front of training, on handles of its own."""
    if processes.ahead is None:
        return stage
    engines = PromptsInFlight(processes.engines)
    groups = replace(stage.groups, queue=processes.queue.handle())
    return RolloutAhead(
        replace(stage, engines=engines, groups=groups, clock=Clock()),
        engines,
        processes.ahead,
        stage.clock,
        ahead=config.rollout.ahead,
        last_step=config.run.max_steps,
    )


def collector_options(config: Config) -> CollectorOptions:
    rollout, algorithm = config.rollout, config.algorithm
    return CollectorOptions(
        on_incomplete=rollout.on_incomplete_group,
        filter_groups=algorithm.filter_groups,
        max_rounds=algorithm.filter_max_rounds,
        on_short=rollout.on_short_batch,
    )


def make_trainer(config: Config, stages: Stages) -> Trainer:
    trainer_class = plugins.import_object(dataflow.mode_named(config.mode).trainer)
    trainer: Trainer = trainer_class.build(stages)
    return trainer


def training_task(config: Config) -> Assignment:
    return Assignment(
        seed=config.run.seed,
        step=0,
        group_size=config.rollout.group_size,
        sampling=configure.sampling(config),
        greedy=facts.features(config).has_greedy_baseline,
        turns=facts.features(config).credits_turns,
    )


def kl_controller(config: Config) -> Controller:
    algorithm = config.algorithm
    target = algorithm.kl_target if algorithm.kl_controller == "adaptive" else None
    return Controller(algorithm.kl_reward_coef, target, algorithm.kl_horizon)


def make_probe(config: Config, actor: Group[Actor], vocabulary: int) -> Callable[[], Probe]:
    """Returns a function that scores one fixed sequence with the trainer: engines must agree after a weight sync."""
    length = min(PROBE_TOKENS, facts.context_tokens(config))
    tokens = [(7 * i * i + 3 * i + config.run.seed) % vocabulary for i in range(length)]
    tolerance = SYNC_TOLERANCE if facts.compute_dtype(config) == "float32" else ROUGH_SYNC_TOLERANCE
    return lambda: Probe(tokens, actor.call(Actor.probe, tokens), tolerance)


def validation_task(config: Config) -> Assignment:
    return Assignment(
        seed=config.run.seed,
        step=0,
        group_size=config.validation.samples,
        sampling=configure.sampling(config, temperature=config.validation.temperature),
        partition="val",
        greedy=True,
        keep_tensors=False,
    )
