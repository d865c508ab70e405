"""The student's loss and gradient: against the plain formulas, and whatever the rows are cut into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM
from workers.taught import CASES, LOSSES, SPECIAL, Class, columns_for, gradient, plain_divergence, take

from tqppo import dataflow
from tqppo.algorithms.layout import to_nested
from tqppo.errors import ConfigError
from tqppo.tiny.model import VOCABULARY
from tqppo.workers.actor import Actor
from tqppo.workers.compute import logprobs
from tqppo.workers.specs import ModelSpec, OptimizerSpec
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
    figures = {
        "actor/loss": float(chosen.detach().mean()),
        "distillation/loss": float(divergences.mean()),
        "distillation/loss_min": float(divergences.min()),
        "distillation/loss_max": float(divergences.max()),
    }
    assert {name: metrics[name] for name in figures} == pytest.approx(figures, rel=2e-6, abs=1e-6)


# -- invariance --------------------------------------------------------------------------------------------------------


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
    found = update(student, take(taught, order, padding))
    close(found[0], expected[0])
    close(found[1], expected[1])


def test_an_empty_or_all_padding_batch_changes_nothing_and_reports_no_divergence(students: Any, taught: Rows) -> None:
    student: Student = students("forward_kl_topk", "supervised")
    mask = taught["response_mask"]
    nothing = {**taught, "response_mask": to_nested(torch.zeros_like(mask.values()), mask.offsets().diff())}
    metrics, _ = update(student, nothing)
    assert metrics["padding/all_padding"] == 1
    assert not [name for name in metrics if name.startswith("distillation/")]


# -- what counts -------------------------------------------------------------------------------------------------------


def poisoned(rows: Rows) -> Rows:
    """The rows with NaN wherever a teacher speaks of a special token or of one outside the response mask."""
    found = dict(rows)
    for name in ("teacher_hidden", "teacher_logprobs", "sampled"):
        parts = []
        for tokens, mask, values in zip(*(rows[n].unbind() for n in ("tokens", "response_mask", name)), strict=True):
            counts = torch.zeros(len(tokens), dtype=torch.bool)
            counts[-len(mask) - 1 : -1] = mask & ~torch.isin(tokens[-len(mask) :], torch.tensor(SPECIAL))
            parts.append(torch.where(counts[:, None], values, torch.nan))
        found[name] = to_nested(torch.cat(parts), rows[name].offsets().diff())
    return found


@pytest.mark.parametrize("task", [False, True], ids=["alone", "with-reward"])
@pytest.mark.parametrize("loss", LOSSES[2:])
def test_a_special_token_contributes_nothing(students: Any, taught: Rows, loss: str, task: bool) -> None:
    student: Student = students(loss, "supervised", task=task)
    found, expected = update(student, poisoned(taught)), update(student, taught)
    close(found[0], expected[0], tolerance=0.0)
    close(found[1], expected[1], tolerance=0.0)


def test_special_tokens_count_if_none_are_named(school: Class, students: Any, taught: Rows) -> None:
    spec = school.spec("k3", "supervised")
    assert spec.distill is not None
    open_student = Student(replace(spec, distill=replace(spec.distill, special_ids=())))
    open_student.start()
    found, masked = (update(each, taught)[0] for each in (open_student, students("k3", "supervised")))
    assert found["distillation/loss"] != pytest.approx(masked["distillation/loss"], abs=1e-4)


def test_without_the_task_s_reward_only_the_teacher_is_read(students: Any) -> None:
    student: Student = students("forward_kl_topk", "supervised")
    reads = dataflow.ACTOR_UPDATE.reads(student.features)
    assert set(reads) == {"tokens", "response_mask", "teacher_ids", "teacher_logprobs", "teacher_index"}
    assert student._scoring() is None  # neither log-probabilities of sampled tokens nor entropies


def test_with_the_task_s_reward_the_losses_add_up(students: Any, taught: Rows) -> None:
    both, alone = (students("k3", "supervised", task=task) for task in (True, False))
    for student in (both, alone):
        student.spec = replace(student.spec, policy_loss=replace(student.spec.policy_loss, aggregate="token-mean"))
    actor = Actor(replace(both.spec, features=replace(both.features, has_teachers=False)))
    actor.start()
    sum_metrics, sum_gradient = update(both, taught)
    term_metrics, term = update(alone, taught)
    columns = {name: taught[name] for name in dataflow.ACTOR_UPDATE.reads(actor.features)}
    policy_metrics = actor.update(columns, step=1)
    assert sum_metrics["actor/loss"] == pytest.approx(
        policy_metrics["actor/loss"] + 0.3 * term_metrics["distillation/loss"], abs=1e-6
    )
    assert sum_metrics["actor/entropy"] == pytest.approx(policy_metrics["actor/entropy"])
    policy = gradient(actor)
    close(sum_gradient, {name: policy[name] + 0.3 * term[name] for name in term})


def test_correction_weights_scale_the_policy_gradient(school: Class, students: Any, taught: Rows) -> None:
    plain: Student = students("k1", "policy_gradient")
    weighted = school.student_of("k1", "policy_gradient", features=replace(plain.features, has_correction_weights=True))
    weights = taught["correction_weights"]
    doubled = {
        **taught,
        "correction_weights": to_nested(torch.full_like(weights.values(), 2.0), weights.offsets().diff()),
    }
    expected = {name: 2 * each for name, each in update(plain, taught)[1].items()}
    close(update(weighted, doubled)[1], expected)


def test_clamps_bound_the_divergence(school: Class, taught: Rows) -> None:
    spec = school.spec("k1", "policy_gradient")
    assert spec.distill is not None
    student = Student(replace(spec, distill=replace(spec.distill, loss_max=0.01)))
    student.start()
    metrics, _ = update(student, taught)
    assert metrics["distillation/loss_max"] == pytest.approx(0.01)
    assert metrics["distillation/loss_min"] == pytest.approx(-0.01)
    student.spec = replace(spec, distill=replace(spec.distill, logprob_min=-1e-3))
    assert update(student, taught)[0]["distillation/abs_loss"] == 0.0  # both are at the bound everywhere


def test_k1_is_refused_where_it_would_be_backpropagated(school: Class) -> None:
    with pytest.raises(ConfigError, match="does not depend on the teacher"):
        school.student_of("k1", "supervised")


# -- figures -----------------------------------------------------------------------------------------------------------


def test_top_k_figures_worked_out_by_token(school: Class, students: Any, taught: Rows) -> None:
    metrics, _ = update(students("forward_kl_topk", "supervised"), taught)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (school.student, *school.teachers)]
    figures: dict[int, list[tuple[float, float, float]]] = {0: [], 1: []}
    for i, (tokens, mask) in enumerate(zip(taught["tokens"].unbind(), taught["response_mask"].unbind(), strict=True)):
        with torch.no_grad():
            q, p = (model(tokens[None]).logits[0].softmax(-1) for model in (models[0], models[1 + i % 2]))
        for place in range(len(mask)):
            if not mask[place] or int(tokens[place - len(mask)]) in SPECIAL:
                continue
            at = len(tokens) - len(mask) + place - 1
            best, own = (set(each[at].topk(5).indices.tolist()) for each in (p, q))
            masses = [float(sum(each[at, v] for v in best)) for each in (q, p)]
            figures[i % 2].append((masses[0], masses[1], len(best & own) / 5))
    for prefix, rows in (("", figures[0] + figures[1]), ("sums/", figures[0]), ("words/", figures[1])):
        student, teacher, overlap = zip(*rows, strict=True)
        expected = {
            "student_mass": sum(student) / len(rows),
            "student_mass_min": min(student),
            "student_mass_max": max(student),
            "teacher_mass": sum(teacher) / len(rows),
            "teacher_mass_min": min(teacher),
            "teacher_mass_max": max(teacher),
            "overlap_ratio": sum(overlap) / len(rows),
        }
        assert {k: metrics[f"distillation/{prefix}{k}"] for k in expected} == pytest.approx(expected, abs=1e-6)


def test_names_of_the_figures(students: Any, taught: Rows) -> None:
    metrics, _ = update(students("k3", "policy_gradient"), taught)
    clipping = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    figures = {"loss", "abs_loss", "loss_min", "loss_max"}
    by_teacher = {f"{teacher}/{name}" for teacher in ("sums", "words") for name in figures}
    found = {name.removeprefix("distillation/") for name in metrics if name.startswith("distillation/")}
    assert found == clipping | figures | by_teacher


def test_a_teacher_without_rows_is_left_out_and_a_single_one_is_not_named(
    school: Class, students: Any, taught: Rows
) -> None:
    first = {**taught, "teacher_index": torch.zeros_like(taught["teacher_index"])}
    found = update(students("k3", "supervised"), first)[0]
    assert "distillation/sums/loss" in found
    assert not [name for name in found if "words" in name]
    spec = school.spec("k3", "supervised")
    assert spec.distill is not None
    single = Student(replace(spec, distill=replace(spec.distill, teachers=spec.distill.teachers[:1])))
    single.start()
    assert not [name for name in update(single, first)[0] if "sums" in name]


# -- memory and forms of the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["k3", "forward_kl_topk", "reverse_kl_topk", "forward_kl", "reverse_kl"])
def test_logits_of_all_tokens_are_never_kept(
    students: Any, taught: Rows, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk has 4 tokens; no tensor of more than a chunk's logits is saved for the backward pass."""
    student: Student = students(loss, "supervised")
    student.spec = replace(student.spec, micro_batch_tokens=100_000)
    expected = update(student, taught)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[-1:] == (VOCABULARY,):
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = update(student, taught)
    assert max((tensor.numel() for tensor in saved), default=0) <= 4 * VOCABULARY
    close(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.parametrize("loss", ["k2", "forward_kl_topk", "reverse_kl"])
def test_gradient_checkpointing_changes_no_gradient(school: Class, students: Any, taught: Rows, loss: str) -> None:
    plain: Student = students(loss, "supervised")
    model = replace(plain.spec.model, gradient_checkpointing=True)
    close(update(school.student_of(loss, "supervised", model=model), taught)[1], update(plain, taught)[1])


@pytest.mark.parametrize("loss", ["k2", "forward_kl_topk", "reverse_kl"])
def test_adapters_alone_learn_with_lora(school: Class, taught: Rows, loss: str) -> None:
    spec = school.spec(loss, "supervised")
    model = replace(spec.model, lora_rank=4, gradient_checkpointing=True)
    optimizer = replace(spec.optimizer, lr=0.01, beta1=0.9)
    student = school.student_of(loss, "supervised", model=model, optimizer=optimizer)
    assert all("lora_" in name for name in student.optimizer.parameters)
    losses = [update(student, taught)[0]["distillation/loss"] for _ in range(6)]
    assert losses[-1] < 0.99 * losses[0]


def test_a_student_with_more_ids_than_its_teacher_is_compared_on_the_common_ones(
    school: Class, taught: Rows, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(school.student)
    expected = update(school.student_of("reverse_kl", "supervised"), taught)[0]
    model.resize_token_embeddings(280, mean_resizing=False)
    model.save_pretrained(tmp_path)
    wider = school.student_of("reverse_kl", "supervised", model=ModelSpec(str(tmp_path)))
    found = update(wider, taught)[0]
    assert found["distillation/loss"] == pytest.approx(expected["distillation/loss"], abs=1e-6)


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["k2", "forward_kl_topk", "reverse_kl_topk", "forward_kl", "reverse_kl"])
def test_a_student_comes_to_match_its_teachers(school: Class, taught: Rows, loss: str) -> None:
    student = school.student_of(loss, "supervised", optimizer=OptimizerSpec(lr=0.02), micro_batch_tokens=10_000)
    first = update(student, taught)[0]["distillation/loss"]
    for _ in range(60):
        last = update(student, taught)[0]["distillation/loss"]
    assert 0 <= last < 0.1 * first


def test_over_all_that_a_student_may_sample_the_policy_gradient_of_k1_is_that_of_the_reverse_kl(school: Class) -> None:
    """One row for each token of the vocabulary, weighted by the student's probability of it."""
    prompts = torch.tensor([[5, 80, 9], [200, 3, 41]])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (school.student, *school.teachers)]
    student, *teachers = (model(prompts).logits[:, -1].log_softmax(-1) for model in models)
    teacher = torch.stack([teachers[0][0], teachers[1][1]]).detach()
    (student.exp() * (student - teacher)).sum(1).mean().backward()
    spec = school.spec("k1", "policy_gradient", temperature=1.0)
    assert spec.distill is not None
    features = replace(spec.features, has_correction_weights=True)
    learner = Student(replace(spec, features=features, distill=replace(spec.distill, special_ids=())))
    learner.start()
    _, found = update(learner, rows_of_every_token(prompts, student.detach(), teacher))
    close(found, {f"causal_lm.{name}": p.grad for name, p in models[0].named_parameters()})


def rows_of_every_token(prompts: Tensor, student: Tensor, teacher: Tensor) -> Rows:
    number = 2 * VOCABULARY
    ones, fours = torch.ones(number, dtype=torch.int64), torch.full((number,), 4)
    tokens = torch.cat([prompts.repeat_interleave(VOCABULARY, 0), torch.arange(VOCABULARY).repeat(2)[:, None]], 1)
    theirs = torch.zeros(number, 4)
    theirs[:, 2] = teacher.reshape(-1)
    return {
        "tokens": to_nested(tokens.reshape(-1), fours),
        "response_mask": to_nested(ones.bool(), ones),
        "old_logprobs": to_nested(student.reshape(-1), ones),
        "correction_weights": to_nested(VOCABULARY * student.exp().reshape(-1), ones),
        "sampled": to_nested(theirs.reshape(-1, 1), fours),
        "teacher_index": torch.arange(2).repeat_interleave(VOCABULARY),
    }
