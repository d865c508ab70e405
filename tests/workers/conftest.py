"""Rows and workers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tqppo.algorithms.layout import to_nested
from tqppo.workers.actor import Actor
from tqppo.workers.specs import ModelSpec, OptimizerSpec, RoleSpec

VOCABULARY = 256


def rows_of(prompts: list[int], responses: list[int], *, seed: int = 0) -> dict[str, Any]:
    """Columns of rows with these prompt and response lengths; a few response tokens are masked out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(responses)
    sequences = lengths + torch.tensor(prompts)

    def response(values: torch.Tensor) -> torch.Tensor:
        return to_nested(values, lengths)

    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) > 0.1
    mask[(lengths.cumsum(0) - 1)] = True  # each row keeps at least one token

    def noise() -> torch.Tensor:
        return torch.randn(total, generator=generator)

    tokens = torch.randint(0, VOCABULARY, (int(sequences.sum()),), generator=generator)
    return {
        "tokens": to_nested(tokens, sequences),
        "response_mask": response(mask),
        "old_logprobs": response(-5.5 + 0.2 * noise()),
        "ref_logprobs": response(-5.5 + 0.2 * noise()),
        "advantages": response(noise()),
        "values": response(0.1 * noise()),
        "returns": response(noise()),
        "correction_weights": response(noise().exp().clamp(max=2.0)),
        "session_weight": torch.rand(len(lengths), generator=generator) + 0.1,
    }


@pytest.fixture
def make_rows() -> Callable[..., dict[str, Any]]:
    return rows_of


@pytest.fixture
def rows() -> dict[str, Any]:
    return rows_of([3, 9, 1, 5, 2, 7, 4, 30], [4, 1, 7, 12, 3, 3, 40, 6])


@pytest.fixture
def spec(tiny_model: Path) -> RoleSpec:
    return RoleSpec(ModelSpec(str(tiny_model)), optimizer=OptimizerSpec(lr=3e-4, total_steps=10), micro_batch_tokens=64)


@pytest.fixture
def make_actor(spec: RoleSpec) -> Callable[..., Actor]:
    """An actor in this process, its spec changed as asked."""

    def make(**changes: Any) -> Actor:
        actor = Actor(replace(spec, **changes))
        actor.start()
        return actor

    return make
