"""Credit for sessions, trajectories and turns, worked by hand; the cut of a session into rows does not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tqppo.algorithms.advantages import EstimateInputs, EstimateOptions, estimate
from tqppo.algorithms.credit import Turns, anchor_groups, penalised_rows, returns_of_rows, turn_rows
from tqppo.algorithms.episodes import token_rewards
from tqppo.algorithms.groups import GROUP_ESTIMATORS, RowGroups

GROUP = (*GROUP_ESTIMATORS, "gdpo", "reinforce_plus_plus_baseline")


def rows(session: list[int], lengths: list[int], *, group: list[int] | None = None, padding: int = 0) -> RowGroups:
    """Sessions of one group unless said otherwise; the last row of a session is its final one."""
    numbers = torch.tensor(session)
    is_final = torch.cat([numbers[1:] != numbers[:-1], torch.tensor([True])])
    groups = torch.tensor(group) if group is not None else torch.zeros_like(numbers)
    return RowGroups(
        groups, numbers, is_final, torch.arange(len(session)) >= len(session) - padding, torch.tensor(lengths)
    )


def close(found, expected) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=1e-5)


def inputs_of(reward: list[float], who: RowGroups, **more) -> EstimateInputs:
    mask = torch.ones(int(who.lengths.sum()), dtype=torch.bool)
    return EstimateInputs(torch.tensor(reward).double(), mask, who, **more)


def test_trajectories_are_compared_by_their_own_rewards_and_a_session_still_counts_once():
    """Sessions (1, 3) and (0): means 2 and 0, group mean 1; deviations 0, 2, −1 with weights ½, ½, 1."""
    inputs = inputs_of([1.0, 3.0, 0.0], rows([0, 0, 1], [1, 1, 1]))
    by_row = EstimateOptions(credit="trajectory")
    close(estimate("dr_grpo", inputs, by_row).advantages, [0.0, 2.0, -1.0])
    std = ((0.5 * 0 + 0.5 * 4 + 1) / 1) ** 0.5
    close(estimate("grpo", inputs, by_row).advantages, [0.0, 2.0 / std, -1.0 / std])
    close(estimate("rloo", inputs, by_row).advantages, [1.0, 3.0, -2.0])  # minus the mean of the other session
    close(estimate("opo", inputs, by_row).advantages, [1 - 4 / 3, 3 - 4 / 3, -4 / 3])  # three tokens, each once
    close(estimate("gpg", inputs, by_row).advantages, [0.0, 4.0, -2.0])  # one of two sessions earns
    close(estimate("grpo_passk", inputs, by_row).advantages, [2.0 / std, 2.0 / std, 0.0])
    close(estimate("dr_grpo", inputs, EstimateOptions()).advantages, [1.5, 1.5, -1.5])  # by the final rows: 3 and 0


@pytest.mark.parametrize("name", GROUP)
@given(
    sessions=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(-4, 4)), min_size=1, max_size=6),
    padding=st.integers(0, 2),
)
def test_credit_by_trajectory_is_credit_by_session_where_all_rows_of_a_session_earn_the_same(name, sessions, padding):
    sessions = sorted(sessions)
    which = [i for i, (_, count, _) in enumerate(sessions) for _ in range(count)]
    who = rows(
        [*which, *range(99, 99 + padding)],
        [2] * (len(which) + padding),
        group=[*(sessions[i][0] for i in which), *[9] * padding],
        padding=padding,
    )
    inputs = inputs_of([*(float(sessions[i][2]) for i in which), *[7.0] * padding], who)
    by_session, by_row = (
        estimate(name, inputs, EstimateOptions(credit=credit)) for credit in ("session", "trajectory")
    )
    torch.testing.assert_close(by_row.advantages, by_session.advantages)
    assert by_row.metrics == by_session.metrics


def test_a_row_pays_for_its_own_kl_where_rows_are_credited():
    penalty = torch.tensor([0.5, 0.25, 1.0]).double()
    who = rows([0, 0, 1], [1, 1, 1])
    mask = torch.ones(3, dtype=torch.bool)
    close(penalised_rows(torch.ones(3).double(), who, penalty, mask), [0.5, 0.75, 0.0])
    inputs = inputs_of([1.0, 1.0, 1.0], who, penalty=penalty)
    found = estimate("dr_grpo", inputs, EstimateOptions(credit="trajectory")).advantages
    mean = (0.625 + 0.0) / 2
    close(found, [0.5 - mean, 0.75 - mean, -mean])


def test_rewards_of_rows_fall_on_the_last_token_of_each_that_counts():
    mask = torch.tensor([True, True, False, False, True, True]).bool()
    who = rows([0, 0, 0, 1], [2, 2, 1, 1])
    found = token_rewards(torch.tensor([1.0, 2.0, 4.0, 8.0]), who, mask, credit_rows=True)
    assert found.tolist() == [0.0, 3.0, 0.0, 0.0, 4.0, 8.0]  # the second row has no token that counts


def test_token_estimators_see_the_rewards_of_trajectories_and_turns():
    who = rows([0, 0], [2, 1])
    inputs = inputs_of([1.0, 2.0], who, baseline_reward=torch.zeros(2).double())
    close(estimate("remax", inputs, EstimateOptions()).returns, [2.0, 2.0, 2.0])
    close(estimate("remax", inputs, EstimateOptions(credit="trajectory")).returns, [3.0, 3.0, 2.0])
    turns = Turns(
        torch.tensor([2, 1]), torch.tensor([1, 2, 1]), torch.tensor([0.5, 1.0, 2.0]).double(), torch.zeros(3).long()
    )
    close(estimate("remax", replace(inputs, turns=turns), EstimateOptions(credit="turn")).returns, [3.5, 3.0, 2.0])


TWO_SESSIONS = rows([0, 0, 1, 5], [4, 2, 3, 1], padding=1)
TURNS = Turns(
    counts=torch.tensor([2, 1, 1, 0]),
    ends=torch.tensor([1, 3, 2, 3]),  # the fourth token of the first row follows its last turn
    rewards=torch.tensor([0.0, 1.0, 2.0, 0.5]).double(),
    anchors=torch.tensor([7, 8, 7, 7]),
)


def test_turns_become_rows_and_the_tokens_stay():
    found = turn_rows(TURNS, TWO_SESSIONS)
    assert found.rows.lengths.tolist() == [1, 3, 2, 3, 1]
    assert found.rows.session.tolist() == [0, 0, 0, 1, 5]
    assert found.rows.is_final.tolist() == [False, False, True, True, True]
    assert found.rows.is_padding.tolist() == [False] * 4 + [True]
    assert found.of.tolist() == [0, 0, 1, 2, 3]
    assert found.rewards.tolist() == [0.0, 1.0, 2.0, 0.5, 0.0]
    assert found.anchors.tolist() == [7, 8, 7, 7, 0]


def test_returns_are_discounted_per_turn_within_a_session():
    cut = turn_rows(TURNS, TWO_SESSIONS)
    close(returns_of_rows(cut.rewards, cut.rows, gamma=0.5), [1.0, 2.0, 2.0, 0.5, 0.0])


def test_turns_that_do_not_fit_their_rows_are_a_bug():
    with pytest.raises(AssertionError, match="every row but padding needs its turns"):
        turn_rows(replace(TURNS, counts=torch.tensor([2, 1, 0, 0])), TWO_SESSIONS)
    with pytest.raises(AssertionError, match="must ascend"):
        turn_rows(replace(TURNS, ends=torch.tensor([3, 1, 2, 3])), rows([0, 0, 1, 5], [2, 2, 3, 1], padding=1))


def test_credit_by_turn_compares_returns_each_session_counting_once():
    """Returns 1, 2, 2 of the first session (mean 5/3) and 0.5 of the second; group mean 13/12."""
    inputs = inputs_of([9.0, 9.0, 9.0, 9.0], TWO_SESSIONS, turns=TURNS)
    found = estimate("dr_grpo", inputs, EstimateOptions(credit="turn", turn_gamma=0.5)).advantages
    mean = (5 / 3 + 0.5) / 2
    a, b = 1 - mean, 2 - mean
    close(found, [a, b, b, b, b, b, *[0.5 - mean] * 3, 0.0])


def test_gigpo_worked_by_hand():
    """Episode: totals 3 and 0.5, so ±1.25. State 7: returns 1, 2 and 0.5, mean 7/6; state 8 has one turn, so 0."""
    inputs = inputs_of([9.0, 9.0, 9.0, 9.0], TWO_SESSIONS, turns=TURNS)
    options = EstimateOptions(turn_gamma=0.5, gigpo_weight=2.0, gigpo_std=False)
    found = estimate("gigpo", inputs, options)
    steps = [2 * (1 - 7 / 6), 0.0, 2 * (2 - 7 / 6), 2 * (0.5 - 7 / 6)]
    expected = [1.25 + steps[0], *[1.25 + steps[1]] * 3, *[1.25 + steps[2]] * 2, *[-1.25 + steps[3]] * 3, 0.0]
    close(found.advantages, expected)
    assert found.metrics["training/step_groups"] == 2
    assert found.metrics["training/step_groups_single"] == 1
    assert found.metrics["training/groups"] == 1


def test_gigpo_divides_both_parts_by_the_deviation_of_their_group():
    inputs = inputs_of([9.0, 9.0, 9.0, 9.0], TWO_SESSIONS, turns=TURNS)
    found = estimate("gigpo", inputs, EstimateOptions(turn_gamma=0.5)).advantages
    episode = 1.25 / (2 * 1.25**2) ** 0.5
    deviation = torch.tensor([1.0, 2.0, 0.5]).double().std().item()
    close(found[:1], [episode + (1 - 7 / 6) / deviation])
    close(found[1:4], [episode] * 3)
    close(found[6:9], [-episode + (0.5 - 7 / 6) / deviation] * 3)


def test_gigpo_without_its_step_term_is_grpo_on_the_sum_of_turn_rewards():
    inputs = inputs_of([9.0, 9.0, 9.0, 9.0], TWO_SESSIONS, turns=TURNS)
    found = estimate("gigpo", inputs, EstimateOptions(gigpo_weight=0.0)).advantages
    plain = estimate("grpo", inputs_of([3.0, 3.0, 0.5, 0.0], TWO_SESSIONS), EstimateOptions()).advantages
    torch.testing.assert_close(found, plain)


def test_states_are_shared_within_a_prompt_and_never_between_prompts():
    who = rows([0, 1, 2, 3], [1] * 4, group=[0, 0, 1, 1])
    found = anchor_groups(who, torch.tensor([5, 5, 5, 6]))
    assert found.group[0] == found.group[1]
    assert len(set(found.group.tolist())) == 3


def test_a_reward_models_score_comes_at_the_last_turn_of_a_session():
    score = torch.tensor([0.0, 3.0, 1.0, torch.nan]).double()
    terms = [(1.0, torch.zeros(4).double()), (2.0, score)]
    inputs = inputs_of([0.0, 6.0, 2.0, 0.0], TWO_SESSIONS, turns=TURNS, reward_terms=terms)
    found = estimate("gigpo", inputs, EstimateOptions(gigpo_weight=0.0, gigpo_std=False)).advantages
    close(found[:1], [((3 + 6) - (0.5 + 2)) / 2])
