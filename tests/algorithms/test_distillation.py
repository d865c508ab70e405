from __future__ import annotations

import pytest
import torch

from tqppo.algorithms import distillation, top_k
from tqppo.algorithms.chunks import in_chunks
from tqppo.algorithms.losses import PolicyOptions, PolicyTokens


def student_and_teacher(tokens: int = 7, vocabulary: int = 11, k: int = 3):
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=random, dtype=torch.float64)
    scores = torch.randn(tokens, vocabulary, generator=random, dtype=torch.float64).log_softmax(1)
    best = scores.topk(k, 1)
    return logits, top_k.Teacher(best.indices, best.values), scores


def test_forward_kl_worked_by_hand():
    """p = (0.6, 0.3), q = (0.5, 0.2), the rest of q elsewhere."""
    logits = torch.tensor([[0.5, 0.2, 0.3]]).log()
    teacher = top_k.Teacher(torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]).log())
    found = top_k.compare("forward_kl_topk", logits, teacher)
    torch.testing.assert_close(found.losses, torch.tensor([0.2310325]))
    torch.testing.assert_close(found.student_mass, torch.tensor([0.7]))
    torch.testing.assert_close(found.teacher_mass, torch.tensor([0.9]))


def test_reverse_kl_has_a_bucket_for_the_rest_and_a_gradient_where_upstreams_had_none():
    """q = (0.6, 0.4), p = (0.9, 0.1), k = 1: without the bucket the term is −0.243, clamped to 0 without gradient."""
    logits = torch.tensor([[0.6, 0.4]]).log().requires_grad_()
    teacher = top_k.Teacher(torch.tensor([[0]]), torch.tensor([[0.9]]).log())
    found = top_k.compare("reverse_kl_topk", logits, teacher).losses
    expected = 0.6 * torch.tensor(0.6 / 0.9).log() + 0.4 * torch.tensor(4.0).log()
    torch.testing.assert_close(found, expected[None])
    found.sum().backward()
    assert logits.grad[0, 0] < 0  # more of the teacher's token lowers the loss


@pytest.mark.parametrize("kind", top_k.KINDS)
def test_with_the_whole_vocabulary_top_k_is_the_exact_kl(kind):
    logits, _, scores = student_and_teacher()
    full = scores.topk(11, 1)
    found = top_k.compare(kind, logits, top_k.Teacher(full.indices, full.values)).losses
    log_q = logits.log_softmax(1)
    p_q = (scores.exp() * (scores - log_q)).sum(1)
    q_p = (log_q.exp() * (log_q - scores)).sum(1)
    # The bucket of the reverse loss is empty here, but never under 1e-6.
    torch.testing.assert_close(found, p_q if kind == "forward_kl_topk" else q_p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", top_k.KINDS)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_chunks_change_neither_loss_nor_gradient(kind, size):
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 4, generator=random, dtype=torch.float64).requires_grad_()
    head = torch.randn(11, 4, generator=random, dtype=torch.float64).requires_grad_()
    _, teacher, _ = student_and_teacher()
    scale = torch.rand(7, generator=random).double()

    def run(found):
        return found[0].detach(), *torch.autograd.grad((found[0] * scale).sum(), (hidden, head))

    def compute(part, ids, logprobs):
        return top_k.compare(kind, part @ head.T, top_k.Teacher(ids, logprobs))

    found = in_chunks(compute, (hidden, *teacher), size)
    torch.testing.assert_close(run(found), run(top_k.compare(kind, hidden @ head.T, teacher)))


@pytest.mark.parametrize("kind", top_k.KINDS)
def test_ids_that_the_student_lacks_count_as_impossible(kind):
    """A larger teacher of the same family has more rows in its embeddings; their tokens never occur."""
    logits, teacher, _ = student_and_teacher()
    more = top_k.Teacher(
        torch.cat([teacher.ids, torch.full((7, 1), 11)], 1), torch.cat([teacher.logprobs, torch.full((7, 1), -9.0)], 1)
    )
    found, expected = top_k.compare(kind, logits, more), top_k.compare(kind, logits, teacher)
    torch.testing.assert_close(found[:3], expected[:3], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", top_k.KINDS)
def test_impossible_tokens_of_the_teacher_are_no_nan(kind):
    logits, teacher, _ = student_and_teacher()
    teacher.logprobs[:, -1] = -torch.inf
    logits.requires_grad_()
    found = top_k.compare(kind, logits, teacher)
    found.losses.sum().backward()
    assert all(torch.isfinite(each).all() for each in (*found, logits.grad))


@pytest.mark.parametrize("kind", top_k.KINDS)
def test_of_the_size_of_the_logits_only_the_logits_are_kept(kind):
    logits, teacher, _ = student_and_teacher(tokens=64, vocabulary=500)
    logits.requires_grad_()
    kept = set()

    def note(tensor):
        if tensor.numel() >= 500:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        top_k.compare(kind, logits, teacher)
    assert kept == {logits.untyped_storage().data_ptr()}


def test_divergences_worked_by_hand_and_bounded():
    student, teacher, mask = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5]), torch.ones(2).bool()
    expected = {"k1": [0.5, -1.5], "abs": [0.5, 1.5], "k2": [0.125, 1.125], "k3": [0.1065307, 1.9816891]}
    for kind, values in expected.items():
        torch.testing.assert_close(distillation.divergence(kind, student, teacher, mask), torch.tensor(values))
    found = distillation.divergence("k1", student, teacher, mask, loss_max=0.7)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.7]))
    found = distillation.divergence("k1", student, teacher, mask, logprob_min=-1.2)
    torch.testing.assert_close(found, torch.tensor([0.2, -0.7]))


def test_policy_gradient_uses_minus_the_divergence_as_advantage():
    student = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher, mask = torch.tensor([-1.5, -0.5]), torch.ones(2).bool()
    losses = distillation.divergence("k1", student, teacher, mask)
    tokens = PolicyTokens(student, student.detach(), torch.zeros(2), mask, torch.tensor([2]))
    found = distillation.as_policy_gradient(losses, tokens, PolicyOptions())
    found.losses.sum().backward()
    torch.testing.assert_close(student.grad, torch.tensor([0.5, -1.5]))  # descent makes the second token likelier
    assert set(found.sums) == {"distillation/pg_clipfrac", "distillation/pg_clipfrac_lower", "distillation/ppo_kl"}
