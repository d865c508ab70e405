from __future__ import annotations

import pytest
import torch

from tqppo.algorithms.chunks import in_chunks


def squared_and_doubled(values: torch.Tensor, factors: torch.Tensor):
    return (values.square() * factors[:, None]).sum(1), None, 2 * factors


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_change_neither_value_nor_gradient(size: int) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=random).requires_grad_()
    factors = torch.randn(7, generator=random)
    squares, missing, doubled = in_chunks(squared_and_doubled, (values, factors), size)
    expected, _, _ = squared_and_doubled(values, factors)
    assert missing is None
    torch.testing.assert_close(squares, expected)
    torch.testing.assert_close(doubled, 2 * factors)
    gradients = [torch.autograd.grad(each.sum(), values)[0] for each in (squares, expected)]
    torch.testing.assert_close(*gradients)


def test_several_chunks_keep_no_intermediate_for_the_backward() -> None:
    values, weight = torch.randn(8, 4, requires_grad=True), torch.randn(4, 300)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        in_chunks(lambda part: ((part @ weight).exp().sum(1),), (values,), 2)
    assert max(kept, default=0) < 2 * 300


def test_without_gradients_nothing_is_computed_twice() -> None:
    calls: list[int] = []

    def compute(part: torch.Tensor):
        calls.append(len(part))
        return (part,)

    with torch.no_grad():
        in_chunks(compute, (torch.arange(5.0),), 2)
    assert calls == [2, 2, 1]
