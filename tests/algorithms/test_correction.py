from __future__ import annotations

import math

import pytest
import torch

from tqppo.algorithms import correction

MASK = torch.tensor([True, True, False, True])
LENGTHS = torch.tensor([2, 2])
RATIO = torch.tensor([1.0, 3.0, 1.0, 0.25])


def log_ratio() -> torch.Tensor:
    return torch.where(MASK, RATIO.log(), 0.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("token", [1.0, 2.0, 0.0, 0.25]), ("sequence", [2.0, 2.0, 0.0, 0.25]), ("icepop", [1.0, 0.0, 0.0, 0.0])],
)
def test_weights_worked_by_hand(kind, expected):
    found = correction.importance_weights(kind, log_ratio(), MASK, LENGTHS, cap=2.0, floor=0.5)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("kind", "threshold", "expected"),
    [
        ("token", 2.0, [1, 0, 0, 0]),
        ("token", 4.01, [1, 1, 0, 1]),
        ("seq_sum", 3.01, [1, 1, 0, 0]),
        ("seq_mean", 1.8, [1, 1, 0, 0]),
        ("seq_max", 3.5, [1, 1, 0, 0]),
        ("seq_max", 2.0, [0, 0, 0, 0]),
    ],
)
def test_rejection_worked_by_hand(kind, threshold, expected):
    found = correction.reject(kind, log_ratio(), MASK, LENGTHS, threshold=threshold)
    assert found.int().tolist() == expected


def test_an_engine_that_agrees_has_perfect_diagnostics():
    logprobs = torch.tensor([-1.0, -2.0, torch.nan, -0.5])
    found = correction.diagnostics(logprobs, logprobs, MASK, LENGTHS)
    assert found["rollout_corr/kl"] == found["rollout_corr/k3_kl"] == found["rollout_corr/log_ratio_max"] == 0
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    weights = correction.importance_weights("token", torch.zeros(4), MASK, LENGTHS, cap=2.0)
    assert correction.weight_metrics(weights, MASK, MASK)["rollout_corr/rollout_is_eff_sample_size"] == 1.0


def test_gaps_of_tokens_add_up_to_the_diagnostics():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (-torch.rand(50, generator=generator) for _ in range(2))
    found = correction.diagnostics(ours, theirs, torch.ones(50, dtype=torch.bool), torch.tensor([20, 30]))
    gaps = correction.token_gaps(ours, theirs)
    assert set(gaps) == {*correction.GAP_MEANS, *correction.GAP_MAXIMA}
    for name in correction.GAP_MEANS:
        assert float(gaps[name].mean()) == pytest.approx(found[name], rel=1e-4)
    for name in correction.GAP_MAXIMA:
        assert float(gaps[name].max()) == pytest.approx(found[name], rel=1e-6)


def test_effective_sample_size_and_rejected_share_worked_by_hand():
    kept = torch.tensor([True, False, False, True])
    found = correction.weight_metrics(torch.tensor([1.0, 2.0, torch.nan, 0.0]), MASK, kept)
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx((3 / 3) ** 2 / (5 / 3))
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert found["rollout_corr/rollout_is_max"] == 2.0


def test_diagnostics_leave_padding_rows_out_and_an_all_padding_batch_has_none():
    old, engine = torch.tensor([-1.0, -2.0, torch.nan]), torch.tensor([-1.5, -1.0, torch.nan])
    mask = torch.tensor([True, True, False])
    padded = correction.diagnostics(old, engine, mask, torch.tensor([2, 1]))
    assert padded == correction.diagnostics(old[:2], engine[:2], mask[:2], torch.tensor([2]))
    assert padded["rollout_corr/kl"] == pytest.approx(0.25)
    assert correction.diagnostics(old, engine, torch.zeros(3).bool(), torch.tensor([2, 1])) == {}


def test_extreme_differences_stay_finite():
    extreme = torch.tensor([1e4, -1e4, 0.0, 300.0])
    for kind in ("token", "sequence", "icepop"):
        assert correction.importance_weights(kind, extreme, MASK, LENGTHS, cap=2.0).isfinite().all()
    found = correction.diagnostics(extreme, torch.zeros(4), MASK, LENGTHS)
    assert all(math.isfinite(found[f"rollout_corr/{name}"]) for name in ("kl", "k3_kl", "chi2_token", "chi2_seq"))
