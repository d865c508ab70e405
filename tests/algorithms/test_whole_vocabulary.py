"""The exact divergence over the vocabulary: against the plain formula, its gradient, its memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tqppo.algorithms import top_k
from tqppo.algorithms.chunks import in_chunks
from tqppo.algorithms.whole_vocabulary import KINDS, divergence


def plainly(kind: str, logits: torch.Tensor, teacher: torch.Tensor, low: float | None = None) -> torch.Tensor:
    """The formula with automatic differentiation."""
    log_q, log_p = logits.log_softmax(1), teacher.log_softmax(1)
    if low is not None:
        log_q, log_p = log_q.clamp(min=low), log_p.clamp(min=low)
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum(1)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def both(seed: int = 0, tokens: int = 6, vocabulary: int = 13, dtype: torch.dtype = torch.float64):
    random = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(tokens, vocabulary, generator=random, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_worked_by_hand(kind: str) -> None:
    """q = (0.5, 0.2, 0.3), p = (0.6, 0.3, 0.1)."""
    student, teacher = torch.tensor([[0.5, 0.2, 0.3]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log() + 4.0
    expected = {"forward_kl": 0.1211712, "reverse_kl": 0.1573299}
    torch.testing.assert_close(divergence(kind, student, teacher), torch.tensor([expected[kind]]))


@given(
    kind=st.sampled_from(KINDS),
    low=st.sampled_from([None, -1.0, -3.0, -50.0]),
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 9),
    size=st.integers(1, 10),
)
def test_value_and_gradient_are_those_of_the_full_logits(kind, low, seed, tokens, size) -> None:
    """From hidden states and two output layers in chunks. Values in float32 to 1e-6; the gradients of both in float64,
    because those of the plain formula are up to 3e-6 off in float32."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*shape, generator=random) for shape in ((tokens, 5), (13, 5), (tokens, 4), (13, 4))]
    upstream = torch.rand(tokens, generator=random)

    def computed(dtype):
        hidden, head = (each.to(dtype, copy=True).requires_grad_() for each in drawn[:2])
        theirs, their_head = (each.to(dtype) for each in drawn[2:])

        def compute(part, their_part):
            return (divergence(kind, part @ head.T, their_part @ their_head.T, logprob_min=low),)

        (found,) = in_chunks(compute, (hidden, theirs), size)
        return found, plainly(kind, hidden @ head.T, theirs @ their_head.T, low), (hidden, head)

    found, expected, _ = computed(torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    *both_ways, learnt = computed(torch.float64)
    ours, full = (torch.autograd.grad((each * upstream).sum(), learnt) for each in both_ways)
    torch.testing.assert_close(ours, full, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_the_numerical_check(kind: str) -> None:
    logits, teacher = both()
    assert torch.autograd.gradcheck(partial(divergence, kind, teacher_logits=teacher), logits.requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_no_divergence_and_no_gradient(kind: str) -> None:
    logits, _ = both(dtype=torch.float32)
    logits.requires_grad_()
    found = divergence(kind, logits, logits.detach() + 2.0)  # a softmax does not see a constant
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(logits.grad, torch.zeros(6, 13), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_top_k_of_everything_is_the_same(kind: str) -> None:
    logits, teacher = both()
    best = teacher.log_softmax(1).topk(13, 1)
    found = top_k.compare(f"{kind}_topk", logits, top_k.Teacher(best.indices, best.values)).losses
    torch.testing.assert_close(found, divergence(kind, logits, teacher), atol=1e-4, rtol=1e-4)  # the bucket holds 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longer", ["student", "teacher"])
def test_ids_that_one_model_lacks_are_left_out(kind: str, longer: str) -> None:
    logits, teacher = both()
    padded = [torch.cat([each, torch.full((6, 3), -2.0)], 1) for each in (logits, teacher)]
    found = divergence(
        kind, padded[0] if longer == "student" else logits, padded[1] if longer == "teacher" else teacher
    )
    torch.testing.assert_close(found, divergence(kind, logits, teacher))


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_tokens_are_0_and_not_nan(kind: str) -> None:
    logits, teacher = both(dtype=torch.float32)
    logits[:, 3] = teacher[:, 3] = -torch.inf
    logits.requires_grad_()
    found = divergence(kind, logits, teacher)
    found.sum().backward()
    kept = [i for i in range(13) if i != 3]
    torch.testing.assert_close(found, plainly(kind, logits[:, kept], teacher[:, kept]))
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_size_of_the_logits_only_one_tensor_is_kept(kind: str) -> None:
    hidden, head = torch.randn(16, 4, requires_grad=True), torch.randn(200, 4, requires_grad=True)
    theirs, kept = torch.randn(16, 200), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        divergence(kind, hidden @ head.T, theirs)
    assert sorted(kept)[-2:] == [200 * 4, 16 * 200]


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    logits, teacher = both()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        divergence("forward_kl", logits, teacher)
    assert kept == []


def test_an_unknown_divergence_is_refused() -> None:
    with pytest.raises(AssertionError, match="known: forward_kl, reverse_kl"):
        divergence("jensen", *both())
