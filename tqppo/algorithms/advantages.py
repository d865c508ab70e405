"""Advantages and returns per token. `ADVANTAGES` is the table behind `algorithm.advantage`; workers call `estimate`.

Group estimators (`groups`) give each row one scalar. Token estimators (gae, reinforce_plus_plus, remax and the optimal
token baselines) treat a session as one episode (`episodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tqppo.algorithms.credit import (
    Credit,
    Turns,
    anchor_groups,
    penalised_rows,
    returns_of_rows,
    turn_rows,
)
from tqppo.algorithms.episodes import (
    Grid,
    episode_lengths,
    rewards_to_go,
    session_reward,
    session_totals,
    token_rewards,
)
from tqppo.algorithms.groups import (
    GROUP_ESTIMATORS,
    GroupEstimate,
    RowGroups,
    SingleSession,
    dr_grpo,
    estimate_gdpo,
    estimate_groups,
    grpo,
)
from tqppo.algorithms.layout import apply_mask, per_token, row_counts, whiten
from tqppo.algorithms.scan import discounted_sums
from tqppo.algorithms.token_baseline import optimal_token_baseline
from tqppo.protocols import Metrics


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """The columns that estimators read: [B] per row, [N] per response token. Each estimator uses some of them."""

    reward: Tensor  # [B], read on final rows: the reward of their session
    mask: Tensor  # [N] bool
    rows: RowGroups
    penalty: Tensor | None = None  # [N], β·KL, taken off the reward
    reward_terms: Sequence[tuple[float, Tensor]] = ()  # gdpo: weights and terms [B] that add up to `reward`
    values: Tensor | None = None  # [N], gae
    baseline_reward: Tensor | None = None  # [B], remax: the reward of a greedy session of the same prompt
    old_logprobs: Tensor | None = None  # [N], optimal token baselines
    sum_pi_squared: Tensor | None = None  # [N], optimal token baselines: Σ p² over the vocabulary
    turns: Turns | None = None  # gigpo, and credit for turns
    anchors: Tensor | None = None  # [B], the state of each row once `by_turn` has made rows of the turns


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """Options of the estimators, named like the settings of the config's `algorithm` section."""

    gamma: float = 1.0
    lam: float = 1.0
    single_session: SingleSession = "zero"
    credit: Credit = "session"
    turn_gamma: float = 0.95
    gigpo_weight: float = 1.0
    gigpo_std: bool = True

    @property
    def credit_rows(self) -> bool:
        """Whether rows (trajectories, or turns made rows) are credited one by one."""
        return self.credit != "session"


@dataclass(frozen=True, slots=True)
class Estimate:
    """`advantages` and `returns` [N], 0 where the mask is false."""

    advantages: Tensor
    returns: Tensor
    metrics: Metrics = field(default_factory=dict)


EstimatorFunction = Callable[[EstimateInputs, EstimateOptions], Estimate]


def estimate(name: str, inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """Compute advantages with the estimator called `name`; padding rows influence nothing and get 0."""
    assert name in ADVANTAGES, f"unknown advantage estimator {name!r}; known: {', '.join(ADVANTAGES)}"
    rows = inputs.rows
    if bool(rows.is_padding.any()):
        inputs = replace(inputs, mask=inputs.mask & per_token(~rows.is_padding, rows.lengths))
    if inputs.turns is not None:
        inputs = by_turn(inputs, inputs.turns)
    return ADVANTAGES[name](inputs, options)


def by_turn(inputs: EstimateInputs, turns: Turns) -> EstimateInputs:
    """The same tokens with a row for each turn, which earns the turn's reward.

    Further terms of the reward, such as a reward model's score, come at the session's last turn.
    """
    cut = turn_rows(turns, inputs.rows)
    is_last = cut.rows.is_final & ~cut.rows.is_padding
    terms = [(1.0, cut.rewards)]
    terms += [(weight, apply_mask(is_last, term[cut.of])) for weight, term in inputs.reward_terms[1:]]
    baseline = inputs.baseline_reward
    return replace(
        inputs,
        reward=torch.stack([weight * term for weight, term in terms]).sum(0),
        rows=cut.rows,
        reward_terms=terms,
        baseline_reward=None if baseline is None else baseline[cut.of],
        turns=None,
        anchors=cut.anchors,
    )


def gae(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """Generalised advantage estimates, whitened over the batch; the returns are not."""
    assert inputs.values is not None, "gae needs values"
    rewards = _token_rewards(inputs, options)
    episodes = episode_lengths(inputs.rows)
    raw = generalised_advantages(rewards, inputs.values, inputs.mask, episodes, gamma=options.gamma, lam=options.lam)
    return replace(raw, advantages=whiten(raw.advantages, inputs.mask))


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lam: float
) -> Estimate:
    """GAE over episodes of `lengths` [S] in flat vectors [N], not whitened.

    δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}, where t + 1 is the next token that counts; returns are A + V.
    """
    grid = Grid.of(mask, lengths)
    value = grid.fill(values)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1))
    advantages = discounted_sums(grid.fill(rewards) + gamma * following - value, gamma * lam)
    return Estimate(grid.read(advantages), grid.read(advantages + value))


def reinforce_plus_plus(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """Discounted rewards to go, whitened over the batch (REINFORCE++)."""
    rewards = _token_rewards(inputs, options)
    returns = rewards_to_go(rewards, inputs.mask, episode_lengths(inputs.rows), gamma=options.gamma)
    return Estimate(whiten(returns, inputs.mask), returns)


def remax(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """Rewards to go minus the reward of a greedy session of the same prompt (ReMax)."""
    assert inputs.baseline_reward is not None, "remax needs baseline rewards"
    rows, episodes = inputs.rows, episode_lengths(inputs.rows)
    rewards = _token_rewards(inputs, options)
    returns = rewards_to_go(rewards, inputs.mask, episodes)
    baseline = inputs.baseline_reward[rows.is_final | rows.is_padding]  # one row per episode
    return Estimate(apply_mask(inputs.mask, returns - per_token(baseline, episodes)), returns)


def token_baseline(inputs: EstimateInputs, options: EstimateOptions, *, skips_masked: bool) -> Estimate:
    """Rewards to go minus the optimal token baseline of the group (OTB; `skips_masked` for sessions with tools)."""
    assert inputs.old_logprobs is not None, "token baselines need old log-probabilities"
    assert inputs.sum_pi_squared is not None, "token baselines need Σ p² of each position"
    rows, episodes = inputs.rows, episode_lengths(inputs.rows)
    advantages, returns, is_compared = optimal_token_baseline(
        _token_rewards(inputs, options),
        1.0 - 2.0 * inputs.old_logprobs.exp() + inputs.sum_pi_squared,
        inputs.mask,
        episodes,
        rows.group[rows.is_final | rows.is_padding],
        skips_masked=skips_masked,
    )
    if options.single_session == "zero":
        advantages = apply_mask(per_token(is_compared, episodes), advantages)
    return Estimate(advantages, returns)


def group_estimator(name: str) -> EstimatorFunction:
    """The estimator that gives each row the scalar of its session, by the rule called `name` in `groups`."""

    def estimator(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
        found = estimate_groups(
            GROUP_ESTIMATORS[name],
            _credited(inputs, inputs.reward, options),
            inputs.rows,
            num_tokens=row_counts(inputs.mask, inputs.rows.lengths) if name == "opo" else None,
            single_session=options.single_session,
            credit_rows=options.credit_rows,
        )
        return _on_tokens(found, inputs)

    return estimator


def reinforce_plus_plus_baseline(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """r − the group's mean, whitened over the tokens of the batch (REINFORCE++ with a baseline)."""
    return _whitened(group_estimator("dr_grpo")(inputs, options), inputs.mask)


def gdpo(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """GRPO on each term of the reward by itself, weighted sum, whitened over the tokens (GDPO).

    The KL penalty is taken off the first term, the task's reward.
    """
    (weight, first), *others = inputs.reward_terms or ((1.0, inputs.reward),)
    terms = [(weight, _credited(inputs, first, options))]
    terms += [(each, _credited(replace(inputs, penalty=None), term, options)) for each, term in others]
    found = estimate_gdpo(terms, inputs.rows, single_session=options.single_session, credit_rows=options.credit_rows)
    return _whitened(_on_tokens(found, inputs), inputs.mask)


def gigpo(inputs: EstimateInputs, options: EstimateOptions) -> Estimate:
    """Episode advantage + ω · step advantage: turns taken in the same state are compared by their returns (GiGPO).

    The episode advantage is GRPO's over the sessions' total rewards. A step group holds the turns of one prompt's
    sessions that have one anchor; G_k = r_k + γ G_{k+1} is normalised within it, and a turn alone in its state gets 0.
    """
    assert inputs.anchors is not None, "gigpo needs turns"
    rows, rule = inputs.rows, grpo if options.gigpo_std else dr_grpo
    rewards = penalised_rows(inputs.reward, rows, inputs.penalty, inputs.mask)
    episode = estimate_groups(rule, session_totals(rewards, rows), rows, single_session=options.single_session)
    returns = returns_of_rows(rewards, rows, gamma=options.turn_gamma)
    steps = estimate_groups(rule, returns, anchor_groups(rows, inputs.anchors))
    metrics = episode.metrics | {
        "training/step_groups": steps.metrics["training/groups"],
        "training/step_groups_single": steps.metrics.get("training/groups_single_session", 0.0),
    }
    return _on_tokens(GroupEstimate(episode.scalars + options.gigpo_weight * steps.scalars, metrics), inputs)


def _token_rewards(inputs: EstimateInputs, options: EstimateOptions) -> Tensor:
    """Where rewards fall, by the credit that the options ask for: [N]."""
    return token_rewards(inputs.reward, inputs.rows, inputs.mask, inputs.penalty, credit_rows=options.credit_rows)


def _credited(inputs: EstimateInputs, reward: Tensor, options: EstimateOptions) -> Tensor:
    """What group estimators compare: `reward` [B] of sessions or rows, or returns of turns, less the penalty."""
    if not options.credit_rows:
        return reward if inputs.penalty is None else session_reward(reward, inputs.rows, inputs.penalty, inputs.mask)
    rewards = penalised_rows(reward, inputs.rows, inputs.penalty, inputs.mask)
    if options.credit == "trajectory":
        return rewards
    return returns_of_rows(rewards, inputs.rows, gamma=options.turn_gamma)


def _on_tokens(groups: GroupEstimate, inputs: EstimateInputs) -> Estimate:
    tokens = to_tokens(groups.scalars, inputs.mask, inputs.rows.lengths)
    return Estimate(tokens, tokens, groups.metrics)


def _whitened(raw: Estimate, mask: Tensor) -> Estimate:
    tokens = whiten(raw.advantages, mask)
    return Estimate(tokens, tokens, raw.metrics)


def to_tokens(scalars: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """One scalar per row [B] on each of its tokens that count: [N]."""
    return apply_mask(mask, per_token(scalars, lengths))


ADVANTAGES: dict[str, EstimatorFunction] = {
    "gae": gae,
    **{name: group_estimator(name) for name in GROUP_ESTIMATORS},
    "gdpo": gdpo,
    "gigpo": gigpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "optimal_token_baseline": partial(token_baseline, skips_masked=False),
    "tir_optimal_token_baseline": partial(token_baseline, skips_masked=True),
}
