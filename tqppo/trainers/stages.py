"""What a step is made of: each stage takes a batch and returns it with what it added.

A batch is metadata; the columns that a stage adds are in the queue. A stage that a run does without returns its batch
unchanged. Every stage runs under the step's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Protocol

import torch

from tqppo import dataflow
from tqppo.algorithms.kl import Controller
from tqppo.algorithms.padding import num_padding, padding_rows
from tqppo.columns import column
from tqppo.data.prompts import Prompt
from tqppo.dataflow import Features
from tqppo.errors import OutOfSpace
from tqppo.metrics.events import NothingToTrain, ReportEvent, TrajectoriesNotWritten, unreported
from tqppo.metrics.files import spread
from tqppo.protocols import Metrics, WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.trainers.groups import GroupCollector
from tqppo.trainers.side_by_side import Clock, SideBySide
from tqppo.weights.verify import Probe
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.process.group import Group
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel


class Trainer(Protocol):
    """A mode: `step` is one training step, from prompts to new weights in the engines."""

    def step(self, step: int) -> Metrics: ...


class Engines(Protocol):
    """The replicas of the rollout engine."""

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport: ...
    def load_weights(self, source: WeightSource, probe: Probe | None = None) -> float | None: ...


class Rollout(Protocol):
    """The rollout stage as a step sees it: `RolloutStage`, or `ahead.RolloutAhead`, which samples later steps too."""

    def generate(self, step: int) -> tuple[BatchMeta, Metrics]: ...
    def load_weights(self, source: WeightSource) -> Metrics: ...


@dataclass(frozen=True)
class RolloutStage:
    """Samples the step's groups, and gives the engines new weights."""

    engines: Engines
    groups: GroupCollector
    clock: Clock
    assignment: Assignment
    num_prompts: int
    probe: Callable[[], Probe | None]  # the trainer's log-probabilities of a fixed sequence, for the engines to match
    drawn: Callable[[], Metrics] = dict  # figures of the prompts that were drawn so far

    def generate(self, step: int) -> tuple[BatchMeta, Metrics]:
        """Sample whole groups; returns their rows in canonical order."""
        task = replace(self.assignment, step=step)
        reports: list[RolloutReport] = []
        with self.clock.time("gen"):
            batch, metrics = self.groups.collect(
                self.num_prompts, lambda prompts: reports.append(self.engines.generate(prompts, task)), step
            )
        metrics["perf/total_num_tokens"] = float(sum(tags["seq_len"] for tags in batch.tags))
        figures = RolloutReport.join(reports, one_after_the_other=True).metrics()
        return batch, metrics | tag_metrics(batch.tags) | figures | self.drawn()

    def load_weights(self, source: WeightSource) -> Metrics:
        """Give the engines new weights; returns how far their log-probabilities are from the trainer's, if asked."""
        with self.clock.time("update_weights"):
            return self.load(source, self.probe())

    def load(self, source: WeightSource, probe: Probe | None) -> Metrics:
        difference = self.engines.load_weights(source, probe)
        return {} if difference is None else {"rollout/sync_logprob_diff_max": difference}


@dataclass(frozen=True)
class RewardModelStage:
    group: Group[RewardModel] | None
    clock: Clock

    def score(self, batch: BatchMeta) -> BatchMeta:
        if self.group is None:
            return batch
        with self.clock.time("reward"):
            return self.group.add_columns(RewardModel.score, batch)


@dataclass(frozen=True)
class PaddingStage:
    """Fills a batch up so that mini-batches and ranks get equal shares. Padding rows hold neutral values only."""

    queue: Queue
    clock: Clock
    multiple: int

    def fill(self, batch: BatchMeta, step: int) -> tuple[BatchMeta, Metrics]:
        count = num_padding(len(batch), self.multiple)
        metrics = {
            "padding/rows": float(count),
            "padding/fraction": count / (len(batch) + count),
            "padding/multiple": float(self.multiple),
        }
        if count:
            with self.clock.time("pad"):
                sizes, dtypes = self._sizes(batch)
                rows = padding_rows(count, sizes, dtypes=dtypes, step=step)
                put = self.queue.put(rows.keys, rows.columns, partition=batch.partition, tags=rows.tags)
            batch = BatchMeta.join([batch, put])
        return batch, metrics

    def _sizes(self, batch: BatchMeta) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """Each column's sizes beyond the ragged one, and dtypes that are declared with any.

        Only where the declaration leaves them open is a row looked at.
        """
        sizes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name in batch.columns:
            declared = column(name).trailing
            known = tuple(size for size in declared if size is not None)
            if len(known) < len(declared):
                values = self.queue.get(batch.take([0]), [name])[name].values()
                known, dtypes[name] = tuple(values.shape[1:]), values.dtype
            sizes[name] = known
        return sizes, dtypes


@dataclass(frozen=True)
class ActorStage:
    group: Group[Actor]
    clock: Clock
    features: Features
    mini_batch_rows: int  # rows per optimizer step; 0: all of them
    report: ReportEvent = unreported

    def old_logprobs(self, batch: BatchMeta) -> BatchMeta:
        if not dataflow.OLD_LOGPROBS.runs(self.features):
            return batch
        with self.clock.time("old_log_prob"):
            return self.group.add_columns(Actor.old_logprobs, batch)

    def update(self, batch: BatchMeta, step: int) -> Metrics:
        count = num_mini_batches(batch, self.mini_batch_rows)
        with self.clock.time("update_actor"):
            metrics = self.group.update(Actor.update, batch, step=step, num_mini_batches=count)
        if skipped := int(metrics.get("padding/all_padding", 0)):
            self.report(NothingToTrain(step, "actor", skipped))
        return metrics

    def publish(self, version: int) -> WeightSource:
        """Write the weights where the engines can load them."""
        with self.clock.time("update_weights"):
            return self.group.call(Actor.publish, version)


@dataclass(frozen=True)
class ReferenceStage:
    """The frozen policy: a group of its own, or with LoRA the actor without its adapter."""

    group: Group[Reference] | None
    actor: Group[Actor]
    clock: Clock
    features: Features

    def logprobs(self, batch: BatchMeta) -> BatchMeta:
        if not dataflow.REFERENCE_LOGPROBS.runs(self.features):
            return batch
        with self.clock.time("ref"):
            if self.group is None:
                return self.actor.add_columns(Actor.reference_logprobs, batch)
            return self.group.add_columns(Reference.logprobs, batch)


@dataclass(frozen=True)
class CriticStage:
    group: Group[Critic]
    clock: Clock
    mini_batch_rows: int

    def values(self, batch: BatchMeta) -> BatchMeta:
        with self.clock.time("values"):
            return self.group.add_columns(Critic.values, batch)

    def update(self, batch: BatchMeta, step: int) -> Metrics:
        count = num_mini_batches(batch, self.mini_batch_rows)
        with self.clock.time("update_critic"):
            return self.group.update(Critic.update, batch, step=step, num_mini_batches=count)


def num_mini_batches(batch: BatchMeta, rows: int) -> int:
    return len(batch) // rows if rows else 1


class EstimatorProcess(Protocol):
    """The estimator as the driver sees it. Implemented by `workers.estimator.RemoteEstimator`."""

    def estimate(self, batch: BatchMeta, kl_coef: float) -> tuple[tuple[str, ...], Metrics]: ...
    def write_trajectories(self, batch: BatchMeta, path: Path) -> None: ...


@dataclass
class AdvantageStage:
    """The estimator, and β of the KL in the reward, which the driver steers from step to step."""

    estimator: EstimatorProcess
    clock: Clock
    features: Features
    controller: Controller
    trajectories: Callable[[int], Path | None]  # where a step's trajectories are written, if they are
    skips_on_full_disk: bool = False  # whether trajectories that do not fit on the disk are reported and left out
    report: ReportEvent = unreported

    def estimate(self, batch: BatchMeta, step: int) -> tuple[BatchMeta, Metrics]:
        metrics: Metrics = {} if self.features.has_policy_loss else score_metrics(batch.tags)
        if dataflow.ESTIMATE.runs(self.features):
            with self.clock.time("adv"):
                columns, estimated = self.estimator.estimate(batch, self.controller.coef)
            batch, metrics = batch.with_columns(*columns), metrics | estimated
        if self.features.kl_in_reward:
            metrics["actor/reward_kl_penalty_coeff"] = self.controller.coef
            rows = sum(not tags.get("is_padding") for tags in batch.tags)
            self.controller = self.controller.after(metrics["actor/reward_kl_penalty"], rows)
        if path := self.trajectories(step):
            with self.clock.time("dump_rollout_generations"):
                self._write_trajectories(batch, path, step)
        return batch, metrics

    def _write_trajectories(self, batch: BatchMeta, path: Path, step: int) -> None:
        try:
            self.estimator.write_trajectories(batch, path)
        except OutOfSpace as error:
            if not self.skips_on_full_disk:
                raise OutOfSpace(f"the trajectories of step {step} were not written: {error}") from error
            self.report(TrajectoriesNotWritten(step, str(error)))


@dataclass(frozen=True)
class Stages:
    """Every stage that a run has; a trainer takes those that its step calls."""

    queue: Queue
    rollout: Rollout
    reward_model: RewardModelStage
    padding: PaddingStage
    actor: ActorStage
    reference: ReferenceStage
    critic: CriticStage | None
    advantages: AdvantageStage
    side_by_side: SideBySide
    critic_only_steps: int = 0


def score_metrics(tags: Sequence[Mapping[str, Any]]) -> Metrics:
    """Scores and lengths of real rows, where no estimator reads the rewards: scores once per session."""
    real = [tag for tag in tags if not tag.get("is_padding")]
    last = {(tag["uid"], tag["session"]): tag["reward"] for tag in real}
    return {
        **spread("critic/score", list(last.values())),
        **spread("response_length", [float(tag["response_len"]) for tag in real]),
        **spread("prompt_length", [float(tag["prompt_len"]) for tag in real]),
        "training/num_sessions": float(len(last)),
        "training/num_rows": float(len(real)),
    }


def tag_metrics(tags: Sequence[Mapping[str, Any]]) -> Metrics:
    """Turns and the reward function's further numbers, over sessions (by their last row); what agent loops count."""
    last = {(tag["uid"], tag["session"]): tag for tag in tags}
    extras: dict[str, list[float]] = {}
    for tag in last.values():
        for name, value in tag.get("extra", {}).items():
            extras.setdefault(name, []).append(value)
    found = spread("training/num_turns", [float(tag["turns"]) for tag in last.values()])
    found |= {f"reward/{name}/mean": sum(values) / len(values) for name, values in extras.items()}
    return found | agent_metrics(tags, num_sessions=len(last))


def agent_metrics(tags: Sequence[Mapping[str, Any]], *, num_sessions: int) -> Metrics:
    """Turns per session over its trajectories, the sums of sessions' counters, the means of trajectories' numbers."""
    turns = sum(tag["turns"] for tag in tags) / num_sessions
    sums: dict[str, list[float]] = {"agent/retokenized_tokens": []}
    means: dict[str, list[float]] = {}
    for tag in tags:
        for name, value in tag.get("counts", {}).items():
            sums.setdefault(name, []).append(value)
        for name, value in tag.get("metrics", {}).items():
            means.setdefault(name, []).append(value)
    totals = {name: fsum(values) for name, values in sums.items()}
    return {"agent/turns": turns, **totals} | {
        f"agent/{name}/mean": fsum(values) / len(values) for name, values in means.items()
    }
