from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tqppo.algorithms.advantages import (
    ADVANTAGES,
    EstimateInputs,
    EstimateOptions,
    estimate,
    generalised_advantages,
)
from tqppo.algorithms.credit import Turns
from tqppo.algorithms.episodes import token_rewards
from tqppo.algorithms.groups import RowGroups
from tqppo.algorithms.layout import whiten
from tqppo.algorithms.scan import discounted_sums


def rows(session: list[int], lengths: list[int], padding: int = 0) -> RowGroups:
    """One group; a session's last row is its final one; the last rows are padding."""
    numbers = torch.tensor(session)
    is_final = torch.tensor([*(a != b for a, b in pairwise(session)), True])
    is_padding = torch.arange(len(session)) >= len(session) - padding
    return RowGroups(torch.zeros_like(numbers), numbers, is_final, is_padding, torch.tensor(lengths))


def close(found, expected) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=1e-6)


def test_gae_worked_by_hand_steps_over_masked_tokens():
    mask = torch.tensor([True, True, False, True])
    found = generalised_advantages(
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
    two_rows = EstimateInputs(torch.tensor([5.0, 1.0]).double(), mask, rows([0, 0], [3, 4]), values=values)
    one_row = EstimateInputs(torch.tensor([1.0]).double(), mask, rows([0], [7]), values=values)
    split, whole = estimate("gae", two_rows, options), estimate("gae", one_row, options)
    torch.testing.assert_close(split.advantages, whole.advantages)
    torch.testing.assert_close(split.returns, whole.returns)


def test_the_reward_comes_at_the_last_token_of_the_session_that_counts():
    mask = torch.tensor([1, 1, 0, 0, 0]).bool()
    found = token_rewards(torch.tensor([7.0, 3.0]), rows([4, 4], [3, 2]), mask)
    assert found.tolist() == [0.0, 3.0, 0.0, 0.0, 0.0]


def test_the_kl_of_all_trajectories_of_a_session_enters_its_reward():
    penalty = torch.tensor([0.1, 0.2, 0.4, torch.nan])
    mask = torch.tensor([1, 1, 1, 0]).bool()
    inputs = EstimateInputs(torch.tensor([9.0, 1.0, 1.0]), mask, rows([0, 0, 1], [1, 1, 2]), penalty=penalty)
    # Sessions 1 − 0.3 and 1 − 0.4, mean 0.65.
    close(estimate("dr_grpo", inputs, EstimateOptions()).advantages, [0.05, 0.05, -0.05, 0.0])


def test_remax_subtracts_the_greedy_reward_once_per_session():
    reward, baseline = torch.tensor([9.0, 1.0, 0.5]), torch.tensor([0.25, 0.25, 0.75])
    mask = torch.ones(4, dtype=torch.bool)
    inputs = EstimateInputs(reward, mask, rows([0, 0, 1], [1, 1, 2]), baseline_reward=baseline)
    found = estimate("remax", inputs, EstimateOptions())
    close(found.returns, [1.0, 1.0, 0.5, 0.5])
    close(found.advantages, [0.75, 0.75, -0.25, -0.25])


def test_gdpo_normalises_each_term_of_the_reward_by_itself():
    """Terms (0, 1) and (10, 0): GRPO makes ∓1/√2 and ±1/√2 of them, weights 1 and 3 leave ±√2, whitening ±1/√2."""
    terms = [(1.0, torch.tensor([0.0, 1.0])), (3.0, torch.tensor([10.0, 0.0]))]
    inputs = EstimateInputs(torch.tensor([30.0, 1.0]), torch.ones(2).bool(), rows([0, 1], [1, 1]), reward_terms=terms)
    found = estimate("gdpo", inputs, EstimateOptions())
    close(found.advantages, [0.5**0.5, -(0.5**0.5)])
    assert found.metrics["training/groups_zero_variance"] == 0


def test_gdpo_counts_a_group_as_flat_only_if_every_term_is():
    terms = [(1.0, torch.tensor([0.0, 1.0])), (1.0, torch.tensor([1.0, 0.0]))]
    inputs = EstimateInputs(torch.ones(2), torch.ones(2).bool(), rows([0, 1], [1, 1]), reward_terms=terms)
    assert estimate("gdpo", inputs, EstimateOptions()).metrics["training/groups_zero_variance"] == 0
    flat = EstimateInputs(torch.ones(2), torch.ones(2).bool(), rows([0, 1], [1, 1]))
    assert estimate("gdpo", flat, EstimateOptions()).metrics["training/groups_zero_variance"] == 1


@pytest.mark.parametrize(("single_session", "expected"), [("zero", 0.0), ("raw", 4.0)])
def test_gdpo_gives_a_single_session_what_the_option_says(single_session, expected):
    """Whitening over two groups, one of a single session: its scalar before whitening is 0 or the reward."""
    who = RowGroups(*(torch.tensor(x) for x in ([0, 1, 1], [0, 1, 2], [True] * 3, [False] * 3, [1, 1, 1])))
    inputs = EstimateInputs(torch.tensor([4.0, 1.0, 0.0]), torch.ones(3).bool(), who)
    found = estimate("gdpo", inputs, EstimateOptions(single_session=single_session)).advantages
    scalars = torch.tensor([expected, 0.5**0.5, -(0.5**0.5)])
    torch.testing.assert_close(found, whiten(scalars, torch.ones(3).bool()), rtol=1e-4, atol=1e-4)


def otb_inputs(reward, mask, who, logprobs=None) -> EstimateInputs:
    """Without log-probabilities every token is certain to 1/2: 1 − 2·½ + Σp² with Σp² = 1 is weight 1."""
    logprobs = torch.full(mask.shape, 0.5).log() if logprobs is None else logprobs
    return EstimateInputs(
        torch.tensor(reward), mask, who, old_logprobs=logprobs, sum_pi_squared=torch.ones_like(logprobs)
    )


def test_the_optimal_token_baseline_worked_by_hand():
    """Two rows of 2 and 1 tokens, rewards 1 and 0, weights 1: at step 1 the mean ½, beyond the shorter row 0."""
    inputs = otb_inputs([1.0, 0.0], torch.ones(3).bool(), rows([0, 1], [2, 1]))
    found = estimate("optimal_token_baseline", inputs, EstimateOptions())
    close(found.advantages, [0.5, 1.0, -0.5])
    close(found.returns, [1.0, 1.0, 0.0])


def test_token_baselines_weigh_paths_by_how_uncertain_they_were():
    logprobs = torch.tensor([0.5, 0.875]).log()  # weights 1 and 1 − 1.75 + 1 = ¼
    inputs = otb_inputs([1.0, 0.0], torch.ones(2).bool(), rows([0, 1], [1, 1]), logprobs)
    close(estimate("optimal_token_baseline", inputs, EstimateOptions()).advantages, [1 - 0.8, -0.8])


def test_tools_shift_positions_in_one_token_baseline_and_not_in_the_other():
    """Row 0 is (observation, token), row 1 (token, token): by position row 0's token meets row 1's second one."""
    mask = torch.tensor([False, True, True, True])
    inputs = otb_inputs([1.0, 0.0], mask, rows([0, 1], [2, 2]))
    by_position = estimate("optimal_token_baseline", inputs, EstimateOptions()).advantages
    by_count = estimate("tir_optimal_token_baseline", inputs, EstimateOptions()).advantages
    close(by_count, [0.0, 0.5, -0.5, 0.0])  # the second token of row 1 is beyond row 0
    assert by_position.tolist() != by_count.tolist()


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_fully_masked_row_is_no_member_of_its_group_for_token_baselines(name):
    mask = torch.tensor([True, True, False])
    inputs = otb_inputs([1.0, 5.0], mask, rows([0, 1], [2, 1]))
    close(estimate(name, inputs, EstimateOptions(single_session="raw")).advantages, [1.0, 1.0, 0.0])
    close(estimate(name, inputs, EstimateOptions(single_session="zero")).advantages, [0.0, 0.0, 0.0])


def one_turn_each(reward, who: RowGroups) -> Turns:
    """Every row is one turn, all in the same state."""
    ones = torch.ones_like(who.lengths)
    return Turns(ones, who.lengths, reward, ones)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_padding_and_masked_tokens_influence_no_estimator(name):
    torch.manual_seed(0)
    reward, baseline, mask = torch.rand(3).double(), torch.rand(3).double(), torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    columns = {each: torch.rand(6).double() for each in ("penalty", "values", "sum_pi_squared")}
    columns["old_logprobs"] = -torch.rand(6).double()
    who = rows([0, 0, 1], [2, 2, 2])
    turns = one_turn_each(reward, who) if name == "gigpo" else None
    plain = estimate(
        name, EstimateInputs(reward, mask, who, baseline_reward=baseline, turns=turns, **columns), EstimateOptions()
    )
    noise = torch.tensor([torch.nan]).double()
    poisoned = {each: torch.cat([torch.where(mask, values, torch.nan), noise]) for each, values in columns.items()}
    padded = estimate(
        name,
        EstimateInputs(
            torch.cat([reward, noise]),
            torch.cat([mask, torch.tensor([True])]),
            rows([0, 0, 1, 9], [2, 2, 2, 1], padding=1),
            baseline_reward=torch.cat([baseline, noise]),
            turns=replace(turns, counts=torch.tensor([1, 1, 1, 0])) if turns else None,
            **poisoned,
        ),
        EstimateOptions(),
    )
    torch.testing.assert_close(padded.advantages[:6], plain.advantages)
    torch.testing.assert_close(padded.returns[:6], plain.returns)
    assert padded.advantages[6] == 0
    assert padded.advantages[1] == 0
    assert padded.metrics == plain.metrics


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_do_not_depend_on_the_order_of_sessions(name):
    torch.manual_seed(0)
    order = [2, 0, 3, 1]
    lengths, group = torch.tensor([2, 1, 3, 2]), torch.tensor([0, 1, 0, 1])
    tokens = [torch.arange(8).split(lengths.tolist())[i] for i in order]
    where, yes = torch.cat(tokens), torch.ones(4, dtype=torch.bool)
    reward, baseline = torch.rand(4).double(), torch.rand(4).double()
    columns = {each: torch.rand(8).double() for each in ("penalty", "values", "sum_pi_squared", "old_logprobs")}
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool()
    who = RowGroups(group, torch.arange(4), yes, ~yes, lengths)
    shuffled = RowGroups(group[order], torch.tensor(order), yes, ~yes, lengths[order])
    turns = one_turn_each(reward, who) if name == "gigpo" else None
    plain = estimate(
        name, EstimateInputs(reward, mask, who, baseline_reward=baseline, turns=turns, **columns), EstimateOptions()
    )
    moved = {each: values[where] for each, values in columns.items()}
    turns = one_turn_each(reward[order], shuffled) if name == "gigpo" else None
    inputs = EstimateInputs(reward[order], mask[where], shuffled, baseline_reward=baseline[order], turns=turns, **moved)
    torch.testing.assert_close(estimate(name, inputs, EstimateOptions()).advantages, plain.advantages[where])


def test_rows_of_a_session_that_are_apart_are_a_bug():
    who = RowGroups(*(torch.tensor(x) for x in ([0, 0, 0], [0, 1, 0], [False, True, True], [False] * 3, [1, 1, 1])))
    with pytest.raises(AssertionError, match="follow one another"):
        estimate("reinforce_plus_plus", EstimateInputs(torch.zeros(3), torch.ones(3).bool(), who), EstimateOptions())
