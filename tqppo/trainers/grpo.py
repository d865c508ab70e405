"""GRPO and its relatives: several sessions per prompt, compared with each other instead of with a critic."""

from __future__ import annotations

from tqppo.trainers.stages import Metrics, Stages


class GrpoTrainer:
    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def step(self, step: int) -> Metrics:
        """One training step. Beside each stage: the columns that it adds to the batch."""
        s = self.stages
        batch = s.rollout.generate(step)  # tokens, response_mask, rollout_logprobs, reward
        batch = s.reward_model.score(batch)  # + model_score
        batch = s.padding.fill(batch, step)
        batch = s.old_policy.logprobs(batch)  # + old_logprobs
        batch = s.reference.logprobs(batch)  # + ref_logprobs
        batch = s.advantages.estimate(batch, step)  # + advantages
        metrics = s.actor.update(batch, step)
        s.rollout.load_weights(s.actor.publish(step))
        s.queue.clear(batch)
        return metrics
