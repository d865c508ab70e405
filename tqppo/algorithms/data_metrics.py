"""Statistics of a batch, under the names that verl uses. Real rows only; scores and rewards once per session.

A statistic of an empty set (no session, no token that counts) is left out, never 0 or NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tqppo.algorithms.advantages import Estimate, EstimateInputs
from tqppo.algorithms.episodes import session_reward
from tqppo.protocols import Metrics


def data_metrics(
    inputs: EstimateInputs, result: Estimate, prompt_lengths: Tensor, *, max_prompt: int, max_response: int
) -> Metrics:
    """Statistics of what the estimator read and found. `prompt_lengths` [B]; clip ratios are against the two limits.

    critic/score is the task's reward, critic/rewards the same after the penalty, both over sessions whose final
    response is not empty. Lengths are of rows.
    """
    rows, mask = inputs.rows, inputs.mask
    real = ~rows.is_padding
    responses, prompts = rows.lengths[real], prompt_lengths[real]
    if not responses.numel():
        return {"padding/all_padding": 1.0}
    finals = rows.is_final & real & (rows.lengths > 0)
    penalised = inputs.reward
    if inputs.penalty is not None:
        penalised = session_reward(inputs.reward, rows, inputs.penalty, mask)
    metrics = {
        **_spread("critic/score", inputs.reward[finals]),
        **_spread("critic/rewards", penalised[finals]),
        **_spread("critic/advantages", result.advantages[mask]),
        **_spread("critic/returns", result.returns[mask]),
        **_lengths("response_length", responses, max_response),
        **_lengths("response_length_non_aborted", responses[responses > 0], max_response),
        **_lengths("prompt_length", prompts, max_prompt),
        "response/aborted_ratio": float((responses == 0).double().mean()),
        "training/num_sessions": float((rows.is_final & real).sum()),
        "training/num_rows": float(real.sum()),
    }
    if inputs.values is not None:
        metrics |= _value_metrics(inputs.values[mask], result.returns[mask])
    return metrics


def _spread(name: str, values: Tensor) -> Metrics:
    if not values.numel():
        return {}
    values = values.detach().double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _lengths(name: str, lengths: Tensor, limit: int) -> Metrics:
    if not lengths.numel():
        return {}
    return _spread(name, lengths) | {f"{name}/clip_ratio": float((lengths >= limit).double().mean())}


def _value_metrics(values: Tensor, returns: Tensor) -> Metrics:
    metrics = _spread("critic/values", values)
    if values.numel() > 1:
        values, returns = values.detach().double(), returns.double()
        unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
        metrics["critic/vf_explained_var"] = 1.0 - float(unexplained)
    return metrics
