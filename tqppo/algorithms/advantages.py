"""Advantages and returns per token, for every estimator. The estimator worker calls `estimate`.

Group estimators (`groups`) give each row one scalar. Token estimators (gae, reinforce_plus_plus, remax) see a session
as one episode: its rows follow one another, and the reward comes at the episode's last token that counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tqppo.algorithms.groups import GROUP_ESTIMATORS, Fallback, Metrics, Rows, dr_grpo, estimate_groups
from tqppo.algorithms.layout import bit_mask, blank, blank_, first_sums, per_token, row_counts, row_sum, whiten
from tqppo.algorithms.scan import discounted_sums


@dataclass(frozen=True, slots=True)
class Estimate:
    """`advantages` and `returns` [N], 0 where the mask is false."""

    advantages: Tensor
    returns: Tensor
    metrics: Metrics = field(default_factory=dict)


def session_reward(reward: Tensor, rows: Rows, penalty: Tensor, mask: Tensor) -> Tensor:
    """`reward` [B] minus the penalty [N] (β·KL) summed over all rows of the session; to be read on final rows."""
    per_row = row_sum(blank(mask, penalty), rows.lengths) * ~rows.is_padding  # [B]
    ids, which = torch.unique(rows.session, return_inverse=True)
    return reward - per_row.new_zeros(ids.numel()).index_add_(0, which, per_row)[which]


def episode_lengths(rows: Rows) -> Tensor:
    """How many tokens each session has in the flat vector, in the order of the rows."""
    ids, which, counts = torch.unique_consecutive(rows.session, return_inverse=True, return_counts=True)
    assert ids.numel() == torch.unique(ids).numel(), "rows of a session must follow one another"
    return rows.lengths.new_zeros(counts.numel()).index_add_(0, which, rows.lengths)


def token_rewards(reward: Tensor, rows: Rows, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """The final row's reward [B] at the session's last token that counts, minus `penalty` [N] on every token: [N]."""
    episodes = episode_lengths(rows)
    finals = rows.is_final & ~rows.is_padding
    _, which = torch.unique_consecutive(rows.session, return_inverse=True)
    rewards = reward.new_zeros(episodes.numel()).index_add_(0, which[finals], reward[finals])  # [S]
    seen, ends = mask.cumsum(0, dtype=torch.int32), episodes.cumsum(0)
    last = torch.searchsorted(seen, first_sums(seen, ends))  # [S], where the count of the episode's end is reached
    found = first_sums(seen, ends) > first_sums(seen, ends - episodes)
    tokens = reward.new_zeros(mask.numel())
    tokens[last[found]] = rewards[found]
    return tokens if penalty is None else tokens.sub_(blank(mask, penalty))


@dataclass(frozen=True, slots=True)
class Grid:
    """The tokens that count as [episodes, longest], each row from the left: masked tokens take no step."""

    cell: Tensor  # [N], each token's place in the flattened grid, counted from 1; 0 where the mask is false
    shape: tuple[int, int]

    @staticmethod
    def of(mask: Tensor, lengths: Tensor) -> Grid:
        ends = lengths.cumsum(0)
        seen = mask.cumsum(0)
        before = first_sums(seen, ends - lengths)
        width = int((first_sums(seen, ends) - before).max()) if lengths.numel() else 0
        first = torch.arange(lengths.numel(), device=mask.device) * width - before
        cell = seen.add_(per_token(first, lengths)).bitwise_and_(bit_mask(mask, torch.int64))
        return Grid(cell, (lengths.numel(), width))

    def fill(self, values: Tensor) -> Tensor:
        """[N] → [episodes, longest], 0 where a row has ended."""
        cells = values.new_zeros(self.shape[0] * self.shape[1] + 1)
        return cells.scatter_(0, self.cell, values)[1:].view(self.shape)

    def read(self, grid: Tensor) -> Tensor:
        """[episodes, longest] → [N], 0 where the mask is false."""
        return torch.nn.functional.pad(grid.reshape(-1), (1, 0)).index_select(0, self.cell)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lam: float) -> Estimate:
    """Generalised advantage estimates over episodes of `lengths` [S] in flat vectors [N]. Not whitened.

    δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}, where t + 1 is the next token that counts; returns are A + V.
    """
    grid = Grid.of(mask, lengths)
    value = grid.fill(values)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1))
    advantages = discounted_sums(grid.fill(rewards) + gamma * following - value, gamma * lam)
    return Estimate(grid.read(advantages), grid.read(advantages + value))


def rewards_to_go(rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + γ G_{t+1} over the tokens of each episode that count: [N]."""
    if gamma == 1.0:
        # What the episode has in all minus what came before: a difference of long sums, hence in float64.
        counted = blank(mask, rewards)
        upto = counted.cumsum(0, dtype=torch.float64)
        after = per_token(first_sums(upto, lengths.cumsum(0)), lengths).sub_(upto).to(rewards.dtype)
        return blank_(mask, after.add_(counted))
    grid = Grid.of(mask, lengths)
    return grid.read(discounted_sums(grid.fill(rewards), gamma))


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float) -> Estimate:
    """Discounted rewards to go, whitened over the batch (REINFORCE++)."""
    returns = rewards_to_go(rewards, mask, lengths, gamma=gamma)
    return Estimate(whiten(returns, mask), returns)


def remax(rewards: Tensor, baseline: Tensor, mask: Tensor, lengths: Tensor) -> Estimate:
    """Rewards to go minus the reward of a greedy rollout of the same prompt, `baseline` [S] (ReMax)."""
    returns = rewards_to_go(rewards, mask, lengths)
    return Estimate(blank_(mask, returns - per_token(baseline, lengths)), returns)


def to_tokens(scalars: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """One scalar per row [B] on each of its tokens that count: [N]."""
    return blank_(mask, per_token(scalars, lengths))


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """The settings algorithm.gamma, lam and single_session."""

    gamma: float = 1.0
    lam: float = 0.95
    single_session: Fallback = "zero"


def estimate(
    name: str,
    reward: Tensor,
    mask: Tensor,
    rows: Rows,
    options: EstimateOptions,
    *,
    penalty: Tensor | None = None,
    critic: Tensor | None = None,
) -> Estimate:
    """Any estimator by its config name, from session rewards [B] (read on final rows) to advantages [N].

    `penalty` [N] is β·KL in the reward. `critic` is values [N] for gae, the greedy rewards [B] for remax.
    """
    if bool(rows.is_padding.any()):
        mask = mask & per_token(~rows.is_padding, rows.lengths)
    if name in GROUP_ESTIMATORS or name == "reinforce_plus_plus_baseline":
        return _estimate_groups(name, reward, mask, rows, options, penalty)
    episodes = episode_lengths(rows)
    if name == "remax":
        return _estimate_remax(reward, mask, rows, episodes, penalty, critic)
    rewards = token_rewards(reward, rows, mask, penalty)
    if name == "reinforce_plus_plus":
        return reinforce_plus_plus(rewards, mask, episodes, gamma=options.gamma)
    if name == "gae":
        assert critic is not None, "gae needs values"
        raw = gae(rewards, critic, mask, episodes, gamma=options.gamma, lam=options.lam)
        return Estimate(whiten(raw.advantages, mask), raw.returns)
    raise AssertionError(f"unknown advantage estimator {name!r}")


def _estimate_groups(
    name: str, reward: Tensor, mask: Tensor, rows: Rows, options: EstimateOptions, penalty: Tensor | None
) -> Estimate:
    reward = reward if penalty is None else session_reward(reward, rows, penalty, mask)
    groups = estimate_groups(
        GROUP_ESTIMATORS.get(name, dr_grpo),
        reward,
        rows,
        num_tokens=row_counts(mask, rows.lengths) if name == "opo" else None,
        single_session=options.single_session,
    )
    tokens = to_tokens(groups.scalars, mask, rows.lengths)
    tokens = whiten(tokens, mask) if name == "reinforce_plus_plus_baseline" else tokens
    return Estimate(tokens, tokens, groups.metrics)


def _estimate_remax(
    reward: Tensor, mask: Tensor, rows: Rows, episodes: Tensor, penalty: Tensor | None, baseline: Tensor | None
) -> Estimate:
    assert baseline is not None, "remax needs baseline rewards"
    closing = rows.is_final | rows.is_padding  # one row per episode
    if penalty is not None:
        return remax(token_rewards(reward, rows, mask, penalty), baseline[closing], mask, episodes)
    # Without a penalty the reward to go is the session's reward, on every token.
    returns = reward[closing]
    return Estimate(to_tokens(returns - baseline[closing], mask, episodes), to_tokens(returns, mask, episodes))
