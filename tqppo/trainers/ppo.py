"""PPO with a critic: advantages by GAE, the value function trained beside the policy."""

from __future__ import annotations

from tqppo.trainers.stages import Learner, Metrics, Stages


class PpoTrainer:
    def __init__(self, stages: Stages, critic: Learner, *, critic_only_steps: int) -> None:
        self.stages = stages
        self.critic = critic
        self.critic_only_steps = critic_only_steps

    def step(self, step: int) -> Metrics:
        """One training step. Beside each stage: the columns that it adds to the batch."""
        s = self.stages
        batch = s.rollout.generate(step)  # tokens, response_mask, rollout_logprobs, reward
        batch = s.reward_model.score(batch)  # + model_score
        batch = s.padding.fill(batch, step)
        batch = s.old_policy.logprobs(batch)  # + old_logprobs
        batch = s.reference.logprobs(batch)  # + ref_logprobs
        batch = self.critic.values(batch)  # + values
        batch = s.advantages.estimate(batch, step)  # + advantages, returns
        metrics = self.critic.update(batch, step)
        if step > self.critic_only_steps:
            metrics |= s.actor.update(batch, step)
            s.rollout.load_weights(s.actor.publish(step))
        s.queue.clear(batch)
        return metrics
