"""A trajectory: what an agent loop returns, and what becomes one row of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tqppo.protocols import FinishReason


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence of prompt and response tokens. The mask and the log-probabilities have one value per response token;
    the mask is True on tokens that the model sampled. Other response tokens have log-probability 0.

    Of the credit that a loop may give itself: `reward` of the last trajectory replaces the reward function for its
    session, that of an earlier one counts with `algorithm.credit = "trajectory"`. `turn_rewards` and `anchors` have one
    entry per sampled turn and count with `algorithm.credit = "turn"` and `algorithm.advantage = "gigpo"`.
    """

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    response_mask: Sequence[bool]
    logprobs: Sequence[float]
    finish: FinishReason
    weight_version: int
    num_turns: int = 1
    answer: str | None = None  # what the reward function scores; None: the text of the whole response
    reward: float | None = None  # the loop's own; None: the reward function scores the session
    metrics: Mapping[str, float] = field(default_factory=dict)  # means over rows, as `agent/NAME/mean`
    turn_ends: Sequence[int] = ()  # the index in the response after each sampled turn
    turn_rewards: Sequence[float] = ()
    anchors: Sequence[str] = ()  # names of the states that the turns began in; equal states of a group share a name
