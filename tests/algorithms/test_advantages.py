from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tqppo.algorithms.advantages import EstimateOptions, estimate, gae, token_rewards
from tqppo.algorithms.groups import Rows
from tqppo.algorithms.layout import whiten
from tqppo.algorithms.scan import discounted_sums


def rows(session: list[int], lengths: list[int], padding: int = 0) -> Rows:
    """One group; a session's last row is its final one; the last rows are padding."""
    numbers = torch.tensor(session)
    is_final = torch.tensor([*(a != b for a, b in pairwise(session)), True])
    is_padding = torch.arange(len(session)) >= len(session) - padding
    return Rows(torch.zeros_like(numbers), numbers, is_final, is_padding, torch.tensor(lengths))


def close(found, expected) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=1e-6)


def test_gae_worked_by_hand_steps_over_masked_tokens():
    mask = torch.tensor([True, True, False, True])
    found = gae(
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
        torch.tensor([0.5, 0.4, 9.9, 0.7]),
        mask,
        torch.tensor([4]),
        gamma=1.0,
        lam=0.95,
    )
    close(found.advantages, [0.45575, 0.585, 0.0, 0.3])
    close(found.returns, [0.95575, 0.985, 0.0, 1.0])
    close(whiten(found.advantages, mask), [0.061899, 0.967612, 0.0, -1.029511])


def test_discounted_sums_equal_the_recurrence():
    values = torch.randn(3, 200, dtype=torch.float64)
    for decay in (0.0, 0.5, 0.95, 1.0):
        running, expected = torch.zeros(3, dtype=torch.float64), torch.empty_like(values)
        for t in reversed(range(200)):
            running = values[:, t] + decay * running
            expected[:, t] = running
        torch.testing.assert_close(discounted_sums(values, decay), expected)
    assert discounted_sums(torch.zeros(2, 0), 0.9).shape == (2, 0)


def test_a_sessions_trajectories_are_one_episode():
    """Two rows of one session have the advantages of the same tokens in one row; the reward comes at the end."""
    values, mask = torch.randn(7, dtype=torch.float64), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    options = EstimateOptions(gamma=0.9, lam=0.8)
    split = estimate("gae", torch.tensor([5.0, 1.0]).double(), mask, rows([0, 0], [3, 4]), options, critic=values)
    whole = estimate("gae", torch.tensor([1.0]).double(), mask, rows([0], [7]), options, critic=values)
    torch.testing.assert_close(split.advantages, whole.advantages)
    torch.testing.assert_close(split.returns, whole.returns)


def test_the_reward_comes_at_the_last_token_of_the_session_that_counts():
    mask = torch.tensor([1, 1, 0, 0, 0]).bool()
    found = token_rewards(torch.tensor([7.0, 3.0]), rows([4, 4], [3, 2]), mask)
    assert found.tolist() == [0.0, 3.0, 0.0, 0.0, 0.0]


def test_the_kl_of_all_trajectories_of_a_session_enters_its_reward():
    penalty = torch.tensor([0.1, 0.2, 0.4, torch.nan])
    mask = torch.tensor([1, 1, 1, 0]).bool()
    found = estimate(
        "dr_grpo", torch.tensor([9.0, 1.0, 1.0]), mask, rows([0, 0, 1], [1, 1, 2]), EstimateOptions(), penalty=penalty
    )
    # Sessions 1 − 0.3 and 1 − 0.4, mean 0.65.
    close(found.advantages, [0.05, 0.05, -0.05, 0.0])


def test_remax_subtracts_the_greedy_reward_once_per_session():
    reward, baseline = torch.tensor([9.0, 1.0, 0.5]), torch.tensor([0.25, 0.25, 0.75])
    mask = torch.ones(4, dtype=torch.bool)
    found = estimate("remax", reward, mask, rows([0, 0, 1], [1, 1, 2]), EstimateOptions(), critic=baseline)
    close(found.returns, [1.0, 1.0, 0.5, 0.5])
    close(found.advantages, [0.75, 0.75, -0.25, -0.25])


ALL = ("gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg")


@pytest.mark.parametrize("name", ALL)
def test_padding_and_masked_tokens_influence_no_estimator(name):
    torch.manual_seed(0)
    reward, mask = torch.rand(3).double(), torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    critic = torch.rand(3 if name == "remax" else 6).double()
    penalty = torch.rand(6).double()
    plain = estimate(name, reward, mask, rows([0, 0, 1], [2, 2, 2]), EstimateOptions(), critic=critic, penalty=penalty)
    poisoned, noise = penalty.clone(), torch.tensor([torch.nan]).double()
    poisoned[1] = torch.nan
    critic = critic if name == "remax" else torch.where(mask, critic, torch.inf)
    padded = estimate(
        name,
        torch.cat([reward, noise]),
        torch.cat([mask, torch.tensor([True])]),
        rows([0, 0, 1, 9], [2, 2, 2, 1], padding=1),
        EstimateOptions(),
        critic=torch.cat([critic, noise]),
        penalty=torch.cat([poisoned, noise]),
    )
    torch.testing.assert_close(padded.advantages[:6], plain.advantages)
    torch.testing.assert_close(padded.returns[:6], plain.returns)
    assert padded.advantages[6] == 0
    assert padded.advantages[1] == 0
    assert padded.metrics == plain.metrics


def test_rows_of_a_session_that_are_apart_are_a_bug():
    with pytest.raises(AssertionError, match="follow one another"):
        estimate(
            "reinforce_plus_plus",
            torch.zeros(3),
            torch.ones(3).bool(),
            Rows(*(torch.tensor(x) for x in ([0, 0, 0], [0, 1, 0], [False, True, True], [False] * 3, [1, 1, 1]))),
            EstimateOptions(),
        )
