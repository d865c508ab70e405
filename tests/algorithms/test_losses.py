from __future__ import annotations

import pytest
import torch

from tqppo.algorithms import kl
from tqppo.algorithms.losses import (
    LEARNS_WITHOUT_ADVANTAGE,
    POLICY_LOSSES,
    PolicyOptions,
    PolicyTokens,
    dppo,
    dro,
    gspo,
    ppo,
    value_loss,
)


def tokens(logprobs, old, advantages, mask=None, lengths=None, weights=None) -> PolicyTokens:
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    lengths = torch.tensor([logprobs.numel()]) if lengths is None else lengths
    return PolicyTokens(logprobs, old, advantages, mask, lengths, weights)


def test_ppo_with_clip_higher_and_dual_clip_worked_by_hand():
    advantages, ratio = torch.tensor([1.0, 1, -1, -1, -1]), torch.tensor([1.5, 0.5, 1.5, 0.5, 5.0])
    found = ppo(tokens(ratio.log(), torch.zeros(5), advantages), PolicyOptions(0.2, 0.28, 3.0))
    torch.testing.assert_close(found.losses, torch.tensor([-1.28, -0.5, 1.5, 0.8, 3.0]))
    assert float(found.sums["actor/pg_clipfrac"]) == 2
    assert float(found.sums["actor/pg_clipfrac_lower"]) == 1


def test_dual_clip_can_be_off():
    found = ppo(tokens(torch.tensor([5.0]).log(), torch.zeros(1), torch.tensor([-1.0])), PolicyOptions(clip_dual=0.0))
    torch.testing.assert_close(found.losses, torch.tensor([5.0]))


def test_gspo_bounds_the_mean_of_a_sequence_and_not_its_tokens():
    """Log-ratios 30 and −29.8 have the mean 0.1; with tokens clamped to ±20 it would be 0."""
    given = tokens(torch.tensor([30.0, -29.8]), torch.zeros(2), torch.ones(2))
    torch.testing.assert_close(gspo(given, PolicyOptions()).losses, -torch.full((2,), 0.1).exp())
    extreme = tokens(torch.tensor([60.0, 0.0]), torch.zeros(2), -torch.ones(2))
    torch.testing.assert_close(gspo(extreme, PolicyOptions()).losses, torch.full((2,), 10.0).exp())


def test_dppo_drops_tokens_whose_probability_moved_too_far_the_way_they_are_pushed():
    """Probabilities 0.4 → 0.7 and 0.4 → 0.5, advantages up and down: only the first, pushed up, is dropped."""
    new, old = torch.tensor([0.7, 0.7, 0.5]), torch.tensor([0.4, 0.4, 0.4])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    given = tokens(new.log(), old.log(), advantages)
    found = dppo(given, PolicyOptions(), divergence="tv")
    expected = -advantages * torch.tensor([0.0, 1.75, 1.25]) * new.log()
    torch.testing.assert_close(found.losses, expected)
    assert float(found.sums["actor/pg_clipfrac"]) == 1
    # KL of (0.4, 0.6) from (0.7, 0.3) is 0.4·ln(4/7) + 0.6·ln 2 = 0.192, from (0.5, 0.5) 0.020.
    close = PolicyOptions(clip_low=0.19, clip_high=0.19)
    torch.testing.assert_close(dppo(given, close, divergence="kl").losses, expected)
    far = dppo(given, PolicyOptions(clip_low=0.2, clip_high=0.2), divergence="kl")
    assert float(far.sums["actor/pg_clipfrac"]) == 0


def test_dppo_bounds_the_ratio_unless_the_bound_is_off():
    given = tokens(torch.tensor([0.05]).log(), torch.tensor([0.01]).log(), torch.tensor([1.0]))
    bounded = dppo(given, PolicyOptions(clip_dual=3.0), divergence="tv").losses
    torch.testing.assert_close(bounded, -3.0 * torch.tensor([0.05]).log())
    unbounded = dppo(given, PolicyOptions(clip_dual=0.0), divergence="tv").losses
    torch.testing.assert_close(unbounded, -5.0 * torch.tensor([0.05]).log())


def test_dro_worked_by_hand():
    """−(2·(−1) − ½·0.5·(−1 + 3)²) = 2 + 1."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    found = dro(tokens(logprobs, torch.tensor([-3.0]), torch.tensor([2.0])), PolicyOptions(dro_beta=0.5))
    torch.testing.assert_close(found.losses, torch.tensor([3.0]))
    found.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0 + 0.5 * 2.0]))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_the_named_losses_learn_from_tokens_without_advantage(name):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = tokens(logprobs, torch.tensor([-1.5, -1.0]), torch.zeros(2))
    POLICY_LOSSES[name](given, PolicyOptions()).losses.sum().backward()
    assert bool((logprobs.grad != 0).any()) == (name in LEARNS_WITHOUT_ADVANTAGE)


def test_rollout_correction_multiplies_the_loss():
    given = tokens(torch.zeros(2), torch.zeros(2), torch.ones(2), weights=torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(ppo(given, PolicyOptions()).losses, torch.tensor([-0.5, -2.0]))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4, 88.0, -88.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(name, gap, sign):
    logprobs = torch.tensor([-abs(gap), 0.0, -1.0]).requires_grad_()
    old = torch.tensor([-abs(gap) - gap, -abs(gap), -1.0])
    found = POLICY_LOSSES[name](tokens(logprobs, old, torch.full((3,), sign)), PolicyOptions(clip_dual=0.0))
    found.losses.sum().backward()
    assert found.losses.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_lies_under_the_mask_influences_nothing(name):
    torch.manual_seed(1)
    mask, lengths = torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.tensor([3, 1, 2])
    clean = [torch.randn(6).double() for _ in range(3)] + [torch.rand(6).double()]
    results = []
    for poison in (0.0, torch.nan, torch.inf, -1e30):
        logprobs, old, advantages, weights = (torch.where(mask, each, poison) for each in clean)
        logprobs.requires_grad_()
        found = POLICY_LOSSES[name](tokens(logprobs, old, advantages, mask, lengths, weights), PolicyOptions())
        found.losses.sum().backward()
        results.append((found.losses.detach(), logprobs.grad, *found.sums.values()))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (results[0][1][~mask] == 0).all()


def test_no_tokens_at_all_are_fine():
    empty = torch.zeros(0, requires_grad=True)
    for loss in POLICY_LOSSES.values():
        given = tokens(empty, torch.zeros(0), torch.zeros(0), lengths=torch.tensor([0, 0]))
        assert loss(given, PolicyOptions()).losses.shape == (0,)


def test_kl_estimators_worked_by_hand():
    mask = torch.ones(2, dtype=torch.bool)
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])
    for kind, expected in {"k1": [0.5, -1.5], "k2": [0.125, 1.125], "k3": [0.1065307, 1.9816891]}.items():
        torch.testing.assert_close(kl.estimate(kind, logprobs, ref, mask), torch.tensor(expected))
        torch.testing.assert_close(kl.estimate(f"{kind}+", logprobs, ref, mask), torch.tensor(expected))
    torch.testing.assert_close(kl.estimate("abs", logprobs, ref, mask), torch.tensor([0.5, 1.5]))


@pytest.mark.parametrize("kind", ["k1+", "k2+", "k3+", "abs+"])
def test_straight_through_estimators_have_the_gradient_of_k2(kind):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl.estimate(kind, logprobs, torch.tensor([-1.5, -0.5]), torch.ones(2).bool()).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.5, -1.5]))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_under_the_mask_influences_nothing(kind):
    logprobs = torch.tensor([-1.0, torch.nan], requires_grad=True)
    found = kl.estimate(kind, logprobs, torch.tensor([-1.5, torch.inf]), torch.tensor([True, False]))
    found.sum().backward()
    assert found[1] == 0
    assert logprobs.grad[1] == 0
    assert found.isfinite().all()


def test_k3_of_a_tiny_difference_keeps_its_digits():
    found = kl.estimate("k3", torch.tensor([1e-4]), torch.zeros(1), torch.ones(1).bool())
    torch.testing.assert_close(found, torch.tensor([5e-9]), rtol=1e-2, atol=0)


def test_the_adaptive_controller_moves_beta_towards_its_target_and_the_fixed_one_stays():
    assert kl.Controller(0.05).after(10.0, 100).coef == 0.05
    adaptive = kl.Controller(0.05, target=0.1, horizon=1000)
    assert adaptive.after(10.0, 100).coef == pytest.approx(0.05 * 1.02)
    assert adaptive.after(0.0, 100).coef == pytest.approx(0.05 * 0.98)
    assert adaptive.after(0.11, 100).coef == pytest.approx(0.05 * 1.01)


def test_padding_does_not_move_the_mean_kl():
    values, mask, lengths = torch.tensor([1.0, 3.0, 5.0]), torch.ones(3).bool(), torch.tensor([2, 1])
    padded = torch.cat([values, torch.tensor([torch.nan])]), torch.cat([mask, torch.tensor([False])])
    assert kl.mean_over_rows(values, mask, lengths) == 3.5
    assert kl.mean_over_rows(*padded, torch.tensor([2, 1, 1])) == 3.5


def test_value_loss_worked_by_hand():
    values = torch.tensor([1.0, 3.0, torch.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    found = value_loss(values, torch.tensor([0.0, 3.0, 0.0]), torch.tensor([1.0, 2.0, 0.0]), mask, clip=0.5)
    # First: clip(1, ±0.5) = 0.5, ½·max(0, 0.25); second: unclipped, ½·1.
    torch.testing.assert_close(found.losses, torch.tensor([0.125, 0.5, 0.0]))
    found.losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 1.0, 0.0]))
    unclipped = value_loss(values, values, torch.tensor([1.0, 2.0, 0.0]), mask, clip=0.0)
    torch.testing.assert_close(unclipped.losses, torch.tensor([0.0, 0.5, 0.0]))
