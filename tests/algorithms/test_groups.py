from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tqppo.algorithms.advantages import to_tokens
from tqppo.algorithms.groups import (
    GROUP_ESTIMATORS,
    RowGroups,
    dr_grpo,
    estimate_groups,
    gpg,
    grpo,
    grpo_passk,
    opo,
    rloo,
)

REWARDS = torch.tensor([100.0, 10.0, 400.0, 300.0, 22.0, 38.0])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()


def rows(
    group: list[int], session: list[int] | None = None, final: list[int] | None = None, padding: int = 0
) -> RowGroups:
    count = len(group)
    session = session if session is not None else list(range(count))
    is_final = torch.tensor(final).bool() if final is not None else torch.ones(count, dtype=torch.bool)
    is_padding = torch.arange(count) >= count - padding
    return RowGroups(torch.tensor(group), torch.tensor(session), is_final, is_padding, torch.full((count,), 4))


def scalars(estimator, reward: list[float], who: RowGroups, **options) -> list[float]:
    return estimate_groups(estimator, torch.tensor(reward, dtype=torch.float32), who, **options).scalars.tolist()


def close(found: Tensor | list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_group_of_two_right_and_two_wrong_worked_by_hand():
    one_group = rows([5, 5, 5, 5])
    close(scalars(grpo, [1, 0, 0, 1], one_group), [0.866024, -0.866024, -0.866024, 0.866024])
    close(scalars(dr_grpo, [1, 0, 0, 1], one_group), [0.5, -0.5, -0.5, 0.5])
    close(scalars(rloo, [1, 0, 0, 1], one_group), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    close(scalars(gpg, [1, 0, 0, 1], one_group), [1.0, -1.0, -1.0, 1.0])
    tokens = torch.tensor([1, 2, 3, 4])  # baseline (1 + 4) / 10
    close(scalars(opo, [1, 0, 0, 1], one_group, num_tokens=tokens), [0.5, -0.5, -0.5, 0.5])


def test_pass_at_k_rewards_only_the_best_session_and_no_tie():
    one_group = rows([5, 5, 5])
    std = torch.tensor([3.0, 1.0, 0.0]).std().item()
    close(scalars(grpo_passk, [3, 1, 0], one_group), [2 / (std + 1e-6), 0.0, 0.0])
    close(scalars(grpo_passk, [3, 3, 0], one_group), [0.0, 0.0, 0.0])


def test_each_row_its_own_session_is_plain_grpo():
    found = estimate_groups(grpo, REWARDS, rows([0] * 6)).scalars
    close(found, [-0.272975, -0.818925, 1.546859, 0.940247, -0.746132, -0.649074])


def test_a_session_of_several_trajectories_counts_once_by_its_final_one():
    who = rows([0] * 6, session=[0, 0, 2, 2, 3, 4], final=[0, 1, 0, 1, 1, 1])
    found = estimate_groups(grpo, REWARDS, who).scalars
    # Row 5 is masked whole: upstream loses its scalar there, ours is carried and masked only on the tokens.
    close(found, [-0.594346, -0.594346, 1.494870, 1.494870, -0.507896, -0.392629])
    tokens = to_tokens(found, MASK.reshape(-1), who.lengths).view(6, 4)
    close(tokens[2], [1.494870, 0.0, 1.494870, 0.0])
    close(tokens[5], [0.0] * 4)


def test_a_final_row_without_a_token_that_counts_still_gives_its_session_the_advantage():
    who = rows([0, 0, 0], session=[0, 0, 1], final=[0, 1, 1])
    found = estimate_groups(dr_grpo, torch.tensor([9.0, 1.0, 0.0]), who).scalars
    mask = torch.tensor([[True] * 4, [False] * 4, [True] * 4]).reshape(-1)
    close(to_tokens(found, mask, who.lengths).view(3, 4)[:, 0], [0.5, 0.0, -0.5])


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_single_session_gets_0_or_its_raw_reward_and_is_counted(name):
    who = rows([0, 1, 1])
    estimator = GROUP_ESTIMATORS[name]
    found = estimate_groups(estimator, torch.tensor([0.7, 1.0, 0.0]), who)
    assert found.scalars[0] == 0.0
    assert found.metrics["training/groups_single_session"] == 1
    close(scalars(estimator, [0.7, 1.0, 0.0], who, single_session="raw")[:1], [0.7])


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_give_exactly_0_and_are_counted(name):
    found = estimate_groups(GROUP_ESTIMATORS[name], torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), rows([0, 0, 0, 1, 1]))
    assert found.scalars[:3].tolist() == [0.0, 0.0, 0.0]
    assert found.metrics == {
        "training/groups": 2.0,
        "training/groups_single_session": 0.0,
        "training/groups_zero_variance": 1.0,
    }


def test_nearly_equal_rewards_keep_their_digits():
    reward = torch.tensor([1000.0, 1000.001, 999.999], dtype=torch.float64)
    found = estimate_groups(grpo, reward, rows([0, 0, 0])).scalars
    torch.testing.assert_close(found, torch.tensor([0.0, 0.999, -0.999], dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_padding_rows_influence_nothing(name):
    estimator, reward = GROUP_ESTIMATORS[name], [1.0, 0.0, 0.5]
    alone = estimate_groups(estimator, torch.tensor(reward), rows([0, 0, 0]), num_tokens=torch.tensor([1, 2, 3]))
    padded = estimate_groups(
        estimator,
        torch.tensor([*reward, torch.nan, 1e30]),
        rows([0, 0, 0, 0, 7], padding=2),
        num_tokens=torch.tensor([1, 2, 3, 9, 9]),
    )
    assert padded.scalars.tolist() == [*alone.scalars.tolist(), 0.0, 0.0]
    assert padded.metrics == alone.metrics


def test_a_batch_of_padding_has_no_groups():
    found = estimate_groups(grpo, torch.zeros(2), rows([0, 1], padding=2))
    assert found.scalars.tolist() == [0.0, 0.0]
    assert found.metrics["training/groups"] == 0


def test_a_session_without_a_final_row_is_a_bug():
    with pytest.raises(AssertionError, match="exactly one final row"):
        estimate_groups(grpo, torch.zeros(2), rows([0, 0], final=[1, 0]))
