"""Gradient and metrics of an update do not depend on padding, row order, token budget or the cut over ranks.

Random batches of sessions with several trajectories go through a real queue, the padding stage, the estimator and an
actor or critic with a tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainers.batches import AGGREGATES, Bench, Variant, random_rows

from tqppo.dataflow import Features
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.specs import PolicyLossSpec, ValueLossSpec


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


@pytest.fixture(scope="module")
def grpo(queue: Queue, tiny_model: Path) -> Bench:
    return Bench(queue, str(tiny_model), Features(has_session_weights=True))


@pytest.fixture(scope="module")
def gigpo(queue: Queue, tiny_model: Path) -> Bench:
    return Bench(queue, str(tiny_model), Features(has_session_weights=True, credits_turns=True))


@pytest.fixture(scope="module")
def ppo(queue: Queue, tiny_model: Path) -> Bench:
    return Bench(queue, str(tiny_model), Features(has_critic=True, uses_values=True, has_session_weights=True))


def assert_same(one: tuple[Metrics, Any], other: tuple[Metrics, Any]) -> None:
    assert other[0] == pytest.approx(one[0], rel=1e-4, abs=1e-5)
    assert len(one[1]) == len(other[1])
    for before, after in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-3, atol=2e-6)


VARIANTS = st.builds(
    Variant,
    multiple=st.sampled_from([1, 2, 4, 8, 24]),
    shuffle=st.integers(0, 99),
    budget=st.sampled_from([16, 24, 40, 100_000]),
    ranks=st.sampled_from([1, 2, 4]),
)
CALM = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CALM
@given(seed=st.integers(0, 10_000), variant=VARIANTS, aggregate=st.sampled_from(AGGREGATES))
def test_an_actors_gradient_and_every_metric_are_those_of_the_rows_alone(
    grpo: Bench, seed: int, variant: Variant, aggregate: str
) -> None:
    rows, loss = random_rows(seed), PolicyLossSpec(aggregate=aggregate, horizon=7, entropy_coef=0.01)
    plain = grpo.step(rows, Variant(), Actor, policy_loss=loss)
    assert_same(plain, grpo.step(rows, variant, Actor, policy_loss=loss))


@CALM
@given(seed=st.integers(0, 10_000), variant=VARIANTS)
def test_credit_by_turn_and_by_state_does_not_notice_how_rows_were_padded_ordered_or_cut(
    gigpo: Bench, seed: int, variant: Variant
) -> None:
    rows, loss = random_rows(seed), PolicyLossSpec(aggregate="session-mean", entropy_coef=0.01)
    plain = gigpo.step(rows, Variant(), Actor, policy_loss=loss)
    assert "training/step_groups" in plain[0]
    assert_same(plain, gigpo.step(rows, variant, Actor, policy_loss=loss))


@CALM
@given(seed=st.integers(0, 10_000), variant=VARIANTS, aggregate=st.sampled_from(AGGREGATES))
def test_a_critics_gradient_and_every_metric_are_those_of_the_rows_alone(
    ppo: Bench, seed: int, variant: Variant, aggregate: str
) -> None:
    rows, loss = random_rows(seed), ValueLossSpec(aggregate=aggregate, horizon=7)
    plain = ppo.step(rows, Variant(), Critic, value_loss=loss)
    assert_same(plain, ppo.step(rows, variant, Critic, value_loss=loss))


@CALM
@given(seed=st.integers(0, 10_000), variant=VARIANTS)
def test_with_several_mini_batches_the_amount_of_padding_changes_nothing(
    grpo: Bench, seed: int, variant: Variant
) -> None:
    rows = random_rows(seed)
    little, much = (replace(variant, multiple=multiple, num_mini_batches=2) for multiple in (2, 24))
    plain = grpo.step(rows, replace(little, ranks=1, shuffle=0, budget=100_000), Actor)
    assert_same(plain, grpo.step(rows, little, Actor))
    assert_same(plain, grpo.step(rows, much, Actor))


def test_a_batch_in_which_no_token_counts_trains_nothing_and_says_so(grpo: Bench) -> None:
    rows = [replace(row, mask=[False] * row.response_len) for row in random_rows(3)]
    metrics, gradients = grpo.step(rows, Variant(multiple=8), Actor)
    assert gradients == []
    assert metrics["actor/updates"] == 0
    assert "actor/pg_loss" not in metrics
    assert not any(value != value for value in metrics.values())
