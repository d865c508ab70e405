"""Losses, KL and aggregation against verl's figures, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tqppo.algorithms import kl
from tqppo.algorithms.aggregate import Normalisers, aggregate, normalisers
from tqppo.algorithms.layout import masked_mean
from tqppo.algorithms.losses import POLICY_LOSSES, PolicyOptions, PolicyTokens, value_loss

ALIAS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def whole(case, mask: Tensor, losses: Tensor, mode: str) -> Tensor:
    """Aggregate as verl does by default: everything is here, and the horizon is the padded width."""
    lengths = case.lengths()
    return aggregate(losses, mask, lengths, mode, normalisers(mask, lengths), horizon=float(lengths[0]))


def check_policy(case, loss, mode: str) -> None:
    logprobs, mask = case.flat("log_prob").requires_grad_(), case.mask()
    weights = case.flat("rollout_is_weights") if "rollout_is_weights" in case.inputs else None
    tokens = PolicyTokens(logprobs, case.flat("old_log_prob"), case.flat("advantages"), mask, case.lengths(), weights)
    found = loss(tokens)
    total = whole(case, mask, found.losses, mode)
    total.backward()
    case.close(total, "loss")
    case.close(logprobs.grad, "grad_log_prob")
    for name, value in found.sums.items():
        key = "metric." + name.replace("/", "_")
        if key in case.outputs:
            case.close((value / mask.sum()).double(), key)


@pytest.mark.oracle(
    "pg.vanilla.",
    "pg.gspo.",
    "pg.cispo.",
    "pg.gpg.",
    "pg.geo_mean.",
    "pg.sapo.",
    "pg.dppo_tv.",
    "pg.dppo_kl.",
    "pg.dro.",
)
def test_policy_losses(case):
    """geo_mean and sapo are seq-mean-token-mean in verl whatever the config says; ours follow the config."""
    name, params = case.name.split(".")[1], case.params
    options = PolicyOptions(
        params.get("clip_ratio_low", 0.2),
        params.get("clip_ratio_high", 0.2),
        params.get("clip_ratio_c", 3.0),
        params.get("tau_pos", 1.0),
        params.get("tau_neg", 1.05),
        params.get("dro_beta", 0.1),
    )
    loss = POLICY_LOSSES[{"vanilla": "ppo"}.get(name, name)]
    mode = "seq-mean-token-mean" if name in ("geo_mean", "sapo") else params["loss_agg_mode"]
    check_policy(case, lambda tokens: loss(tokens, options), mode)


@pytest.mark.oracle("value.")
def test_value_loss(case):
    values, mask = case.flat("vpreds").requires_grad_(), case.mask()
    clip = case.params["cliprange_value"]
    found = value_loss(values, case.flat("values"), case.flat("returns"), mask, clip=clip)
    total = whole(case, mask, found.losses, case.params["loss_agg_mode"])
    total.backward()
    case.close(total, "loss", atol=1e-5)
    case.close(values.grad, "grad_vpreds")
    case.close(found.sums["critic/vf_clipfrac"] / mask.sum(), "clipfrac")


@pytest.mark.oracle("agg.")
def test_aggregation(case):
    params = case.params
    mask, lengths, width = case.mask("loss_mask"), case.lengths("loss_mask"), case.inputs["loss_mask"].shape[1]
    mini_batch = normalisers(mask, lengths)
    if "dp_size" in params:
        mini_batch = Normalisers(params["batch_num_tokens"], params["global_batch_size"])
    horizon = float(params.get("loss_scale_factor", width))
    found = aggregate(case.flat("loss_mat"), mask, lengths, params["loss_agg_mode"], mini_batch, horizon=horizon)
    # verl multiplies by the ranks itself, because it averages gradients; here that is the caller's.
    case.close(found * params.get("dp_size", 1), "loss", atol=1e-5)


@pytest.mark.oracle("kl.kl.", "kl.k", "kl.abs.", "kl.mse.", "kl.low_var_kl.")
def test_kl_estimators(case):
    kind = case.params["kl_penalty"]
    logprobs, ref = case.flat("logprob").requires_grad_(), case.flat("ref_logprob")
    found = kl.estimate(ALIAS.get(kind, kind), logprobs, ref, torch.ones_like(ref, dtype=torch.bool))
    found.sum().backward()
    case.close(found, "kl")
    case.close(logprobs.grad, "grad_logprob")


@pytest.mark.oracle("kl.full.")
def test_full_kl_is_refused(case):
    assert case.error.startswith("NotImplementedError")
    with pytest.raises(AssertionError, match="known: k1, abs, k2, k3"):
        kl.estimate("full", torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool))


@pytest.mark.oracle("klreward.")
def test_kl_in_reward(case):
    params, mask, lengths = case.params, case.mask(), case.lengths()
    estimated = kl.estimate("k1", case.flat("old_log_probs"), case.flat("ref_log_prob"), mask)
    rewards = case.flat("token_level_scores") - params["kl_coef"] * estimated
    case.close(rewards, "token_level_rewards")
    mean = kl.mean_over_rows(estimated, mask, lengths)
    case.close(torch.tensor(mean).double(), "metric.actor_reward_kl_penalty")
    adaptive = params["target_kl"] if case.name.startswith("klreward.adaptive") else None
    after = kl.Controller(params["kl_coef"], adaptive, params["horizon"]).after(mean, len(lengths))
    case.close(torch.tensor(after.coef).double(), "kl_coef_after")


@pytest.mark.oracle("masked.")
def test_masked_mean(case):
    case.close(masked_mean(case.flat("values"), case.mask("mask")), "mean")
