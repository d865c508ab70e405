"""Advantages against verl's figures. Rows are one trajectory per session there, except in `multitraj`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tqppo.algorithms import advantages as adv
from tqppo.algorithms.episodes import rewards_to_go
from tqppo.algorithms.groups import EPSILON, RowGroups, dr_grpo, estimate_groups, gpg, grpo, grpo_passk, opo, rloo
from tqppo.algorithms.layout import masked_mean, whiten
from tqppo.algorithms.token_baseline import optimal_token_baseline
from tqppo.workers.estimator import describe_rows


def rows_of(case) -> RowGroups:
    """Each row its own session; groups by the case's index."""
    lengths = case.lengths()
    group = np.unique(case.inputs["index"], return_inverse=True)[1] if "index" in case.inputs else range(len(lengths))
    always = torch.ones(len(lengths), dtype=torch.bool)
    return RowGroups(torch.as_tensor(group), torch.arange(len(lengths)), always, ~always, lengths)


def scores(case) -> Tensor:
    return torch.from_numpy(case.inputs["token_level_rewards"]).sum(-1)


def check_group(case, scalars: Tensor) -> None:
    tokens = adv.to_tokens(scalars, case.mask(), case.lengths())
    case.close(tokens, "advantages")
    case.close(tokens, "returns")


@pytest.mark.oracle("adv.grpo.", "adv.grpo_vectorized.")
def test_grpo_and_dr_grpo(case):
    estimator = grpo if case.params["norm_adv_by_std_in_grpo"] else dr_grpo
    check_group(case, estimate_groups(estimator, scores(case), rows_of(case), single_session="raw").scalars)


@pytest.mark.oracle("adv.rloo.")
def test_rloo(case):
    check_group(case, estimate_groups(rloo, scores(case), rows_of(case), single_session="raw").scalars)


@pytest.mark.oracle("adv.rloo_vectorized.")
def test_rloo_with_0_for_a_single_session_as_in_the_vectorised_form(case):
    """verl's two forms disagree on groups of one; 0 is ours by default, the raw reward an option."""
    check_group(case, estimate_groups(rloo, scores(case), rows_of(case)).scalars)


@pytest.mark.oracle("adv.opo.")
def test_opo(case):
    num_tokens = torch.from_numpy(case.inputs["response_mask"]).sum(-1)
    found = estimate_groups(opo, scores(case), rows_of(case), num_tokens=num_tokens, single_session="raw")
    check_group(case, found.scalars)


@pytest.mark.oracle("adv.gpg.")
def test_gpg(case):
    """On purpose: a single session keeps the raw reward here, where verl multiplies it by α as well."""
    check_group(case, estimate_groups(gpg, scores(case), rows_of(case), single_session="raw").scalars)


@pytest.mark.oracle("adv.reinforce_plus_plus_baseline.")
def test_reinforce_plus_plus_baseline(case):
    options = adv.EstimateOptions(single_session="raw")
    inputs = adv.EstimateInputs(scores(case), case.mask(), rows_of(case))
    found = adv.estimate("reinforce_plus_plus_baseline", inputs, options)
    case.close(found.advantages, "advantages")
    case.close(found.returns, "returns")


@pytest.mark.oracle("adv.gae.")
def test_gae(case):
    """On purpose: 0 under the mask, where verl's returns carry the next token's value."""
    mask, lengths = case.mask(), case.lengths()
    rewards, values = case.flat("token_level_rewards"), case.flat("values")
    raw = adv.generalised_advantages(rewards, values, mask, lengths, **case.params)
    case.close(whiten(raw.advantages, mask), "advantages", where=mask, atol=1e-5)
    case.close(raw.returns, "returns", where=mask, atol=1e-5)


@pytest.mark.oracle("adv.reinforce_plus_plus.")
def test_reinforce_plus_plus(case):
    returns = rewards_to_go(case.flat("token_level_rewards"), case.mask(), case.lengths(), **case.params)
    case.close(whiten(returns, case.mask()), "advantages", atol=1e-5)
    case.close(returns, "returns", atol=1e-5)


@pytest.mark.oracle("adv.remax.")
def test_remax(case):
    """On purpose: 0 under the mask, where verl leaves the reward to go."""
    mask = case.mask()
    baseline = torch.from_numpy(case.inputs["reward_baselines"]).repeat_interleave(case.lengths())
    returns = rewards_to_go(case.flat("token_level_rewards"), mask, case.lengths())
    case.close(returns - baseline, "advantages", where=mask)
    case.close(returns, "returns", where=mask)


@pytest.mark.oracle("multitraj.")
def test_multi_trajectory_grpo(case):
    """Keys are {uid}_{session}_{trajectory}, rows in any order; the highest trajectory closes its session."""
    keys = [key.rsplit("_", 2) for key in case.inputs["keys"].tolist()]
    lengths = case.lengths().tolist()
    tags = [
        {"uid": uid, "session": int(session), "trajectory": int(trajectory), "response_len": length}
        for (uid, session, trajectory), length in zip(keys, lengths, strict=True)
    ]
    rows = describe_rows(tags)
    num_sessions = int(rows.session.max()) + 1
    estimator = grpo if case.params["norm_adv_by_std_in_grpo"] else dr_grpo
    found = estimate_groups(estimator, scores(case), rows, single_session="raw").scalars
    tokens = adv.to_tokens(found, case.mask(), case.lengths())
    # On purpose: verl reads a session's scalar back through the final row's mask, so a session whose final row is
    # masked whole gets 0 from it; ours keeps the scalar.
    by_session = torch.zeros(num_sessions).index_add(
        0, rows.session, (case.mask().view(len(keys), -1).any(1) & rows.is_final).float()
    )
    readable = (by_session > 0)[rows.session].repeat_interleave(rows.lengths)
    case.close(tokens, "advantages", where=readable)
    case.close(tokens, "returns", where=readable)


@pytest.mark.oracle("masked.")
def test_masked_mean_and_whitening(case):
    values, mask = case.flat("values"), case.mask("mask")
    case.close(masked_mean(values, mask), "mean")
    case.close(whiten(values, mask), "whiten", where=mask, atol=1e-5)
    case.close(values[mask].sum(), "sum", atol=1e-5)


@pytest.mark.oracle("adv.grpo_passk.")
def test_grpo_passk(case):
    """On purpose: a group of one gets 0, where verl raises. verl can leave out the division by the deviation."""
    estimator = grpo_passk
    if not case.params["norm_adv_by_std_in_grpo"]:

        def estimator(sessions):
            return grpo_passk(sessions) * (sessions.std + EPSILON)

    check_group(case, estimate_groups(estimator, scores(case), rows_of(case)).scalars)


@pytest.mark.oracle("adv.gdpo_single.")
def test_gdpo_with_one_reward(case):
    if not case.params["norm_adv_by_std_in_grpo"]:
        pytest.skip("ours always divides by the deviation")
    inputs = adv.EstimateInputs(scores(case), case.mask(), rows_of(case))
    found = adv.estimate("gdpo", inputs, adv.EstimateOptions(single_session="raw"))
    case.close(found.advantages, "advantages", atol=1e-5)
    case.close(found.returns, "returns", atol=1e-5)


@pytest.mark.oracle("adv.optimal_token_baseline.", "adv.tir_optimal_token_baseline.")
def test_optimal_token_baseline(case):
    """On purpose: a row without a token that counts is no member of its group, where verl compares with it."""
    if not case.params["handle_zero_tail"]:
        pytest.skip("ours always takes no baseline beyond the end of all other rows")
    mask, rows = case.mask(), rows_of(case)
    weights = 1 - 2 * case.flat("old_log_probs").exp() + case.flat("sum_pi_squared")
    advantages, returns, is_compared = optimal_token_baseline(
        case.flat("token_level_rewards"),
        weights,
        mask,
        rows.lengths,
        rows.group,
        skips_masked=case.name.startswith("adv.tir"),
    )
    has_tokens = mask.view(len(rows.lengths), -1).any(1)
    alone_by_mask = ~is_compared & (torch.bincount(rows.group)[rows.group] > 1) & has_tokens
    comparable = mask & ~alone_by_mask.repeat_interleave(rows.lengths)
    case.close(advantages, "advantages", where=comparable, atol=1e-5)
    case.close(returns, "returns", where=mask, atol=1e-5)
