"""Turns as columns: ends, rewards and states, with defaults for loops that give none."""

from __future__ import annotations

from typing import Any

import pytest

from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.turns import check_turns, turn_columns, turn_ends


def trajectory(**more: Any) -> Trajectory:
    """A turn of two tokens, an observation of one, a turn of two."""
    settings = {"prompt_tokens": [1, 2], "response_tokens": [3, 4, 9, 5, 6], "turn_ends": [2, 5], **more}
    mask = settings.pop("response_mask", [True, True, False, True, True])
    return Trajectory(**settings, response_mask=mask, logprobs=[0.0] * len(mask), finish="stop", weight_version=0)


def values(rows: list[tuple[Trajectory, float]], name: str) -> list[float]:
    return turn_columns(rows)[name].values.tolist()


def test_a_loop_without_turns_has_one_that_earns_the_reward() -> None:
    plain = trajectory(turn_ends=())
    assert turn_ends(plain) == (5,)
    assert values([(plain, 0.5)], "turn_ends") == [5]
    assert values([(plain, 0.5)], "turn_rewards") == [0.5]


def test_without_turn_rewards_the_last_turn_earns_and_with_them_nothing_is_added() -> None:
    assert values([(trajectory(), 0.5)], "turn_rewards") == [0.0, 0.5]
    assert values([(trajectory(turn_rewards=[0.25, 1.0]), 0.5)], "turn_rewards") == [0.25, 1.0]


def test_states_have_the_names_that_the_loop_gives() -> None:
    first, second = trajectory(anchors=["door", "key"]), trajectory(anchors=["key", "door"], prompt_tokens=[7])
    a, b, c, d = values([(first, 0.0), (second, 0.0)], "turn_anchors")
    assert (a, b) == (d, c)
    assert a != b


def test_unnamed_states_are_all_the_tokens_before_a_turn() -> None:
    one, same_start = trajectory(), trajectory(response_tokens=[3, 8, 9, 5, 6])
    a, b, c, d = values([(one, 0.0), (same_start, 0.0)], "turn_anchors")
    assert a == c  # the prompt
    assert b != d  # another first turn
    other_observation = trajectory(response_tokens=[3, 4, 8, 5, 6])
    assert values([(other_observation, 0.0)], "turn_anchors")[1] != b


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"turn_ends": [3, 2]}, "must ascend"),
        ({"turn_ends": [2, 6]}, "within a response of 5"),
        ({"turn_rewards": [1.0]}, "turn_rewards has 1 entries for 2 turns"),
        ({"anchors": ["a", "b", "c"]}, "anchors has 3 entries for 2 turns"),
    ],
)
def test_turns_that_do_not_fit_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    check_turns(trajectory())
    check_turns(trajectory(response_tokens=[], response_mask=[], turn_ends=()))
    with pytest.raises(ValueError, match=message):
        check_turns(trajectory(**wrong))
