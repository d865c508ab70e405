"""Choosing the next token: counter-based random numbers, temperature, top-k, top-p, and exact log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every bit depends on every other."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def streams_of(seeds: Sequence[int]) -> np.ndarray:
    """The start of each request's random numbers, uint64 [B]; neighbouring seeds start far apart."""
    return _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(streams: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, float32 [B]. Depends only on the request's seed and the token's place."""
    words = _mix(streams + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def sample(
    logits: Tensor, uniform: np.ndarray, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities float32 [B], from logits [B, V] and one uniform number per row.

    Temperature 0 takes the likeliest token and reports its log-probability at temperature 1.
    """
    logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], logits.log_softmax(-1).gather(1, tokens)[:, 0]
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1] or top_p < 1:
        logits = filtered(logits, top_k=top_k, top_p=top_p)
    probabilities = logits.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    threshold = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the threshold: never one of probability 0.
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)  # NaN sorts last
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log_()


def filtered(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V] with excluded tokens at -inf: first by top-k, then by top-p of the rest."""
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        excluded = before >= top_p
        excluded[:, 0] = False
        logits = logits.masked_fill(excluded.scatter(1, order, excluded), -torch.inf)
    return logits
