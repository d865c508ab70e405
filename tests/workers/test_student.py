"""The student's loss and gradient: against the plain formulas, and whatever the rows are cut into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM
from workers.taught import CASES, SPECIAL, Class, columns_for, gradient, plain_divergence

from tqppo.algorithms.layout import to_nested
from tqppo.workers.student import Student

Rows = dict[str, Any]
ids = ["-".join(case) for case in CASES]


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Class:
    return Class.create(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def students(school: Class) -> Any:
    """Students by loss and update; they never move, so that all tests can share them."""
    return cache(school.student_of)


@pytest.fixture(scope="module")
def taught(school: Class) -> Rows:
    from workers.conftest import rows_of

    rows = rows_of([3, 9, 1, 5, 2, 7], [4, 1, 7, 12, 3, 9], seed=4)
    tokens = rows["tokens"].values().clone()
    tokens[::6] = SPECIAL[0]
    return school.score({**rows, "tokens": to_nested(tokens, rows["tokens"].offsets().diff())})


def update(student: Student, rows: Rows, **named: Any) -> tuple[Mapping[str, float], dict[str, Tensor]]:
    metrics = student.update(columns_for(student, rows), step=1, **named)
    return metrics, gradient(student)


def close(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name in one:
        a, b = torch.as_tensor(one[name]), torch.as_tensor(other[name])
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# -- the plain formulas ------------------------------------------------------------------------------------------------


def plain_figures(school: Class, rows: Rows, loss: str, update: str) -> tuple[Tensor, Tensor, Any]:
    """Divergence and policy-gradient loss of every token that counts, row by row on full logits, and the model."""
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (school.student, *school.teachers)]
    student, teachers = models[0], models[1:]
    divergences, surrogates = [], []
    for i, tokens in enumerate(rows["tokens"].unbind()):
        mask = rows["response_mask"].unbind()[i]
        prompt = len(tokens) - len(mask)
        sampled = tokens[prompt:]
        counted = mask & ~torch.isin(sampled, torch.tensor(SPECIAL))
        logits = student(tokens[None]).logits[0, prompt - 1 : -1]
        with torch.no_grad():
            theirs = teachers[i % 2](tokens[None]).logits[0, prompt - 1 : -1]
        found = plain_divergence(loss, logits, sampled, theirs)
        logprobs = (logits / 0.8).log_softmax(1).gather(1, sampled[:, None])[:, 0]
        ratio = (logprobs - rows["old_logprobs"].unbind()[i]).exp()
        advantage = -found.detach()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        surrogate = torch.where(advantage < 0, torch.minimum(surrogate, -3 * advantage), surrogate)
        divergences.append(found[counted])
        surrogates.append(surrogate[counted])
    chosen = torch.cat(surrogates if update == "policy_gradient" else divergences)
    return torch.cat(divergences).detach(), chosen, student


@pytest.mark.parametrize(("loss", "update_by"), CASES, ids=ids)
def test_loss_and_gradient_are_those_of_the_full_logits(
    school: Class, students: Any, taught: Rows, loss: str, update_by: str
) -> None:
    divergences, chosen, plain = plain_figures(school, taught, loss, update_by)
    chosen.mean().backward()
    metrics, found = update(students(loss, update_by), taught)
    expected = {f"causal_lm.{name}": p.grad for name, p in plain.named_parameters()}
    close(found, expected)
    assert metrics["actor/loss"] == pytest.approx(float(chosen.detach().mean()), abs=1e-6)
    assert metrics["distillation/loss"] == pytest.approx(float(divergences.mean()), abs=1e-6)
    assert metrics["distillation/loss_min"] == pytest.approx(float(divergences.min()), abs=1e-6)
    assert metrics["distillation/loss_max"] == pytest.approx(float(divergences.max()), abs=1e-6)


# -- invariance --------------------------------------------------------------------------------------------------------


def in_order(rows: Rows, order: list[int], padding: list[int]) -> Rows:
    """The rows in another order, with padding rows before these places."""
    found = {}
    for name, column in rows.items():
        items = list(column.unbind() if column.is_nested else column)
        items = [items[i] for i in order]
        length = 2 if name in ("tokens", "sampled") or name.startswith("teacher_") else 1
        neutral = torch.zeros(length, *items[0].shape[1:], dtype=column.dtype) if column.is_nested else items[0] * 0
        for place in sorted(padding, reverse=True):
            items.insert(place, neutral)
        lengths = torch.tensor([len(item) for item in items]) if column.is_nested else None
        found[name] = torch.stack(items) if lengths is None else to_nested(torch.cat(items), lengths)
    return found


@pytest.mark.parametrize("task", [False, True], ids=["alone", "with-reward"])
@pytest.mark.parametrize(("loss", "update_by"), CASES, ids=ids)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    order=st.permutations(range(6)),
    padding=st.lists(st.integers(0, 6), max_size=3),
    budget=st.sampled_from([1, 30, 10_000]),
    aggregate=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
)
def test_nothing_depends_on_micro_batches_padding_and_the_order_of_rows(
    students: Any,
    taught: Rows,
    loss: str,
    update_by: str,
    task: bool,
    order: Any,
    padding: Any,
    budget: Any,
    aggregate: Any,
) -> None:
    student: Student = students(loss, update_by, task=task)
    policy = replace(student.spec.policy_loss, aggregate=aggregate)
    student.spec = replace(student.spec, policy_loss=policy, micro_batch_tokens=100_000)
    expected = update(student, taught)
    student.spec = replace(student.spec, micro_batch_tokens=budget)  # 1: every micro-batch has one row
    found = update(student, in_order(taught, order, padding))
    close(found[0], expected[0])
    close(found[1], expected[1])
