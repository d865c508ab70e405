from __future__ import annotations

import pytest
import torch

from tqppo.workers.compute.comparison import Comparison, StudentScores, teacher_logits
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.model import LogitTransform
from tqppo.workers.compute.output_layer import OutputLayer

PLAIN = LogitTransform(1.0, None)


def layer(rows: int, width: int, seed: int) -> OutputLayer:
    return OutputLayer(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), None, PLAIN)


def test_each_token_gets_the_logits_of_its_own_teacher_on_the_ids_that_all_have() -> None:
    layers, hidden = (layer(9, 4, 0), layer(7, 3, 1)), torch.randn(5, 4)
    number = torch.tensor([1, 0, 0, 1, 0])
    found = teacher_logits(layers, hidden, number)
    assert found.shape == (5, 7)
    for i, which in enumerate(number.tolist()):
        weight = layers[which].weight
        torch.testing.assert_close(found[i], (weight @ hidden[i, : weight.shape[1]])[:7])


def test_a_teacher_without_tokens_in_the_chunk_is_no_trouble() -> None:
    layers, hidden = (layer(9, 4, 0), layer(9, 4, 1)), torch.randn(3, 4)
    torch.testing.assert_close(teacher_logits(layers, hidden, torch.ones(3).long()), layers[1].logits(hidden))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_is_at_temperature_1_and_policies_at_the_sampling_temperature(temperature: float) -> None:
    logits, targets, teacher = torch.randn(4, 6), torch.tensor([0, 5, 2, 2]), -torch.rand(4)
    comparison = Comparison("k1", (teacher,), scoring=Scoring(temperature, with_entropy=True))
    found = comparison(logits, targets, teacher)
    own, sampled = ((logits / t).log_softmax(1).gather(1, targets[:, None])[:, 0] for t in (1.0, temperature))
    torch.testing.assert_close(found.losses, own - teacher)
    torch.testing.assert_close(found.logprobs, sampled)
    assert found.entropy is not None


def test_an_advantage_has_no_gradient_and_a_loss_has() -> None:
    logits, targets, teacher = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 5, 2, 2]), -torch.rand(4)
    for is_backpropagated in (True, False):
        for scoring in (Scoring(1.0), Scoring(0.5)):
            comparison = Comparison("k3", (teacher,), scoring=scoring, is_backpropagated=is_backpropagated)
            found = comparison(logits, targets, teacher)
            assert found.losses.requires_grad is is_backpropagated
            assert found.logprobs is not None
            assert found.logprobs.requires_grad


def test_what_is_not_asked_for_is_not_there() -> None:
    teacher = -torch.rand(2)
    found = Comparison("k2", (teacher,))(torch.randn(2, 6), torch.tensor([0, 1]), teacher)
    assert found == StudentScores(None, None, found.losses)


def test_top_k_of_a_sharper_student_is_0_and_never_below() -> None:
    """p = (0.5, 0.2) of the top 2, q = (0.7, 0.29): the sum of p log(p/q) is negative."""
    logits = torch.tensor([[0.7, 0.29, 0.01]]).log().requires_grad_()
    columns = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.2]]).log()
    found = Comparison("forward_kl_topk", columns)(logits, torch.tensor([0]), *columns)
    assert found.losses.tolist() == [0.0]
