"""GRPO and its relatives: several sessions per prompt, compared with each other instead of with a critic.

`batch` holds names only: keys, tags, and which columns exist. Tensors stay in the queue, in the memory of the node that
made them; each stage reads its columns there, on its own workers, and puts new ones back.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.trainers.side_by_side import SideBySide
from tqppo.trainers.stages import (
    ActorStage,
    AdvantageStage,
    PaddingStage,
    ReferenceStage,
    RewardModelStage,
    Rollout,
    Stages,
)


@dataclass(frozen=True)
class GrpoTrainer:
    queue: Queue
    rollout: Rollout
    reward_model: RewardModelStage
    padding: PaddingStage
    actor: ActorStage
    reference: ReferenceStage
    advantages: AdvantageStage
    side_by_side: SideBySide

    @classmethod
    def build(cls, stages: Stages) -> GrpoTrainer:
        return cls(
            queue=stages.queue,
            rollout=stages.rollout,
            reward_model=stages.reward_model,
            padding=stages.padding,
            actor=stages.actor,
            reference=stages.reference,
            advantages=stages.advantages,
            side_by_side=stages.side_by_side,
        )

    def step(self, step: int) -> Metrics:
        batch, metrics = self.rollout.generate(step)  # + tokens, response_mask, rollout_logprobs, reward
        batch = self.reward_model.score(batch)  # + model_score, with reward_model.path
        batch, padded = self.padding.fill(batch, step)  # neutral rows, up to a multiple of ranks and mini-batches
        batch = self.side_by_side.columns(
            lambda: self.actor.old_logprobs(batch),  # + old_logprobs, with "recompute" and several updates
            lambda: self.reference.logprobs(batch),  # + ref_logprobs, with a KL
        )
        batch, estimated = self.advantages.estimate(batch, step)  # + advantages
        metrics |= padded | estimated | self.actor.update(batch, step)
        metrics |= self.rollout.load_weights(self.actor.publish(step))
        self.queue.clear(batch)
        return metrics
