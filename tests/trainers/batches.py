"""Random batches of sessions with several trajectories, and the stages from such a batch to an update's gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from tqppo.algorithms.advantages import EstimateOptions
from tqppo.dataflow import Features
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.turns import turn_columns
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import PaddingStage
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.estimator import Estimator, EstimatorSpec
from tqppo.workers.process import bridge
from tqppo.workers.process.group import Shard, split
from tqppo.workers.specs import ModelSpec, OptimizerSpec, RoleSpec

AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "session-mean")


@dataclass(frozen=True)
class RandomRow:
    """One trajectory of a random batch."""

    uid: str
    session: int
    trajectory: int
    tokens: list[int]
    response_len: int
    mask: list[bool]
    reward: float

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session}_{self.trajectory}"

    def trajectory_with_turns(self) -> Trajectory:
        """This row as one turn or two, which begin in one of three states that prompts have in common."""
        begin = len(self.tokens) - self.response_len
        ends = (self.response_len // 2, self.response_len) if self.response_len > 1 else (self.response_len,)
        anchors = [f"state {(self.tokens[0] + i) % 3}" for i in range(len(ends))]
        logprobs = [-5.5] * self.response_len
        return Trajectory(
            self.tokens[:begin], self.tokens[begin:], self.mask, logprobs, "stop", 0, turn_ends=ends, anchors=anchors
        )

    def tags(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "session": self.session,
            "trajectory": self.trajectory,
            "order": int(self.uid[1:]),
            "prompt_len": len(self.tokens) - self.response_len,
            "response_len": self.response_len,
            "seq_len": len(self.tokens),
            "reward": self.reward,
        }


def random_rows(seed: int) -> list[RandomRow]:
    """A few prompts with missing sessions; sessions of one to three trajectories, some without a sampled token."""
    random = Random(seed)
    found = []
    for prompt in range(random.randint(1, 3)):
        for session in random.sample(range(4), random.randint(1, 3)):
            for trajectory in range(random.randint(1, 3)):
                prompt_len, response_len = random.randint(1, 9), random.randint(0, 7)
                share = random.choice([0.0, 0.6, 1.0, 1.0])
                found.append(
                    RandomRow(
                        f"p{prompt}",
                        session,
                        trajectory,
                        [random.randrange(256) for _ in range(prompt_len + response_len)],
                        response_len,
                        [random.random() < share for _ in range(response_len)],
                        float(random.randint(0, 2)),
                    )
                )
    return found


@dataclass(frozen=True)
class Variant:
    """How the same rows are put, padded and cut."""

    multiple: int = 1  # the number of rows is padded up to it
    shuffle: int = 0  # seed of the order in which rows are put
    budget: int = 100_000  # tokens per micro-batch
    ranks: int = 1
    num_mini_batches: int = 1


class Gradients:
    """An optimizer that keeps the gradients instead of following them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.seen: list[dict[str, torch.Tensor]] = []

    def step(self, lr: float) -> tuple[float, bool]:
        self.seen.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})
        for parameter in self.parameters.values():
            parameter.grad = None
        return float(torch.stack([grad.norm() for grad in self.seen[-1].values()]).norm()), True


@dataclass
class Bench:
    """A queue, an estimator and learners that stay as they are, so that updates can be compared."""

    queue: Queue
    model: str
    features: Features
    learners: dict[type, Any] = field(default_factory=dict)

    def batch(self, rows: list[RandomRow], variant: Variant) -> BatchMeta:
        """The rows in the queue, in canonical order, with padding: what a step has before its stages."""
        order = list(rows)
        Random(variant.shuffle).shuffle(order)
        lengths = [row.response_len for row in order]
        columns: dict[str, Any] = {
            "tokens": Jagged(
                torch.tensor([t for row in order for t in row.tokens]), [len(row.tokens) for row in order]
            ),
            "response_mask": Jagged(torch.tensor([m for row in order for m in row.mask], dtype=torch.bool), lengths),
            "rollout_logprobs": Jagged(torch.full((sum(lengths),), -5.5), lengths),
            "reward": torch.tensor([row.reward for row in order]),
        }
        if self.features.credits_turns:
            columns |= turn_columns([(row.trajectory_with_turns(), row.reward) for row in order])
        self.queue.put([row.key for row in order], columns, tags=[row.tags() for row in order])
        batch = self.queue.list().in_order()
        padded, _ = PaddingStage(self.queue, Clock(), variant.multiple).fill(batch, 1)
        return padded

    def step(self, rows: list[RandomRow], variant: Variant, learner: type, **spec: Any) -> tuple[Metrics, Any]:
        """Metrics and gradients of the stages from the batch to the update."""
        batch = self.batch(rows, variant)
        worker = self._learner(learner, micro_batch_tokens=variant.budget, **spec)
        if self.features.uses_values:
            bridge.run_columns(self._learner(Critic, micro_batch_tokens=variant.budget), Critic.values, batch)
        bridge.run_columns(self._learner(Actor, micro_batch_tokens=variant.budget), Actor.old_logprobs, batch)
        metrics = self.estimate(batch)
        gradients = Gradients(worker.model)
        worker.optimizer = gradients
        (shard,) = rejoined(split(batch, variant.ranks, num_mini_batches=variant.num_mini_batches), batch)
        metrics |= bridge.run_update(worker, learner.update, shard.batch, step=1, sizes=shard.sizes)
        self.queue.clear(batch)
        assert not len(self.queue.list())
        return {name: value for name, value in metrics.items() if not name.startswith("padding/")}, gradients.seen

    def estimate(self, batch: BatchMeta) -> Metrics:
        limits = {"max_prompt_tokens": 9, "max_response_tokens": 7, "features": self.features}
        name = "gae" if self.features.uses_values else "gigpo" if self.features.credits_turns else "grpo"
        spec = EstimatorSpec(name, EstimateOptions(single_session="raw"), **limits)
        return Estimator(spec, self.queue).estimate(batch, 0.0)[1]

    def _learner(self, kind: type, **spec: Any) -> Any:
        if kind not in self.learners:
            made = kind(
                RoleSpec(ModelSpec(self.model), optimizer=OptimizerSpec(lr=1e-3, total_steps=10)), queue=self.queue
            )
            made.start()
            self.learners[kind] = made
        worker = self.learners[kind]
        worker.spec = replace(worker.spec, features=self.features, **spec)
        worker.features = self.features
        return worker


def rejoined(shards: list[Shard], batch: BatchMeta) -> list[Shard]:
    """One shard with the mini-batches of several: what the ranks compute together, in one process."""
    places: list[int] = []
    begins = [0] * len(shards)
    for number in range(len(shards[0].sizes)):
        for rank, shard in enumerate(shards):
            places += shard.places[begins[rank] : begins[rank] + shard.sizes[number]]
            begins[rank] += shard.sizes[number]
    sizes = [sum(each) for each in zip(*(shard.sizes for shard in shards), strict=True)]
    return [Shard(batch.take(places), sizes, places)]
