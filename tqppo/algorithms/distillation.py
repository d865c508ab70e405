"""Distillation: the divergence of a student from its teacher on the student's own tokens. Flat layout, see `layout`.

The estimators here need the teacher's log-probability of the sampled token; `top_k` compares distributions.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tqppo.algorithms import kl
from tqppo.algorithms.losses import PolicyOptions, PolicyTokens, TokenLoss, ppo
from tqppo.errors import ConfigError


def check_update(loss: str, update: str) -> None:
    """Refuse to backpropagate k1: without the teacher in its gradient it only makes sampled tokens less likely."""
    if loss == "k1" and update == "supervised":
        raise ConfigError(
            'distillation.loss = "k1" cannot be backpropagated: its gradient does not depend on the teacher; '
            'use update = "policy_gradient", or the loss k2, k3 or forward_kl_topk'
        )


def divergence(
    kind: str,
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    logprob_min: float | None = None,
    loss_max: float | None = None,
) -> Tensor:
    """k1, abs, k2 or k3 between student and teacher on the sampled tokens: [N], with gradient to `logprobs`.

    `logprob_min` bounds both log-probabilities from below first; `loss_max` bounds the result on both sides.
    """
    if logprob_min is not None:
        logprobs, teacher_logprobs = logprobs.clamp(min=logprob_min), teacher_logprobs.clamp(min=logprob_min)
    return bounded(kl.estimate(kind, logprobs, teacher_logprobs, mask), loss_max)


def bounded(losses: Tensor, loss_max: float | None) -> Tensor:
    return losses if loss_max is None else losses.clamp(-loss_max, loss_max)


def as_policy_gradient(losses: Tensor, tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """PPO's clipped loss with −divergence as each token's advantage; `tokens.advantages` is not read."""
    advantages = -losses.detach()
    result = ppo(replace(tokens, advantages=advantages), options)
    return TokenLoss(result.losses, {name.replace("actor/", "distillation/"): v for name, v in result.sums.items()})
