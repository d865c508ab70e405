from __future__ import annotations

import pytest
import torch

from tqppo.workers.compute import logprobs
from tqppo.workers.compute.logprobs import Scoring, measure_tokens


def scored(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float = 0.7):
    measure = Scoring(temperature, with_entropy=True, with_sum_squares=True)
    return measure_tokens(lambda h: h @ weight.T, hidden, targets, measure, vocabulary=len(weight))


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 4), torch.randn(11, 4), torch.randint(0, 11, (9,))


def test_logprobs_and_entropy_are_those_of_the_tempered_softmax(case) -> None:
    hidden, weight, targets = case
    found, entropy, sum_squares = scored(hidden, weight, targets)
    expected = (hidden @ weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(found, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(sum_squares, expected.exp().square().sum(-1))


def test_chunks_change_neither_value_nor_gradient(case, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = case
    results = []
    for elements in (2**26, 22):  # all at once; two tokens at a time
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found, entropy, sum_squares = scored(leaf, head, targets)
        (found.sum() + 0.3 * entropy.sum()).backward()
        results.append((found, entropy, sum_squares, leaf.grad, head.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_what_is_not_asked_for_is_not_computed(case) -> None:
    hidden, weight, targets = case
    found = measure_tokens(lambda h: h @ weight.T, hidden, targets, Scoring(1.0), vocabulary=len(weight))
    assert found[1:] == (None, None)


def test_a_head_in_bfloat16_gets_its_gradient_within_one_percent_from_many_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """37 chunks are 16,384 tokens of a vocabulary of 152,000; they are added up in the head's type."""
    torch.manual_seed(0)
    hidden, head = torch.randn(4096, 64).bfloat16(), (torch.randn(512, 64) / 8).bfloat16()
    targets, advantages = torch.randint(0, 512, (4096,)), torch.randn(4096)

    def gradient(dtype: torch.dtype, chunks: int) -> torch.Tensor:
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4096 * 512 // chunks)
        weight = head.clone().to(dtype).requires_grad_()
        found, *_ = measure_tokens(
            lambda h: h @ weight.T, hidden.to(dtype), targets, Scoring(1.0), vocabulary=len(weight)
        )
        (found * advantages).mean().backward()
        assert weight.grad is not None
        return weight.grad.float()

    exact, whole, chunked = gradient(torch.float32, 1), gradient(torch.bfloat16, 1), gradient(torch.bfloat16, 37)
    assert float((whole - exact).norm() / exact.norm()) > 1e-3, "one product is rounded too"
    assert float((chunked - exact).norm() / exact.norm()) < 0.01
    assert float(torch.nn.functional.cosine_similarity(chunked.flatten(), exact.flatten(), dim=0)) > 0.9999
