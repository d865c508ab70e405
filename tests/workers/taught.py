"""Rows that teachers have scored, students to learn from them, and the losses written out plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tqppo.algorithms.layout import to_nested
from tqppo.dataflow import Features
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.specs import DistillSpec, ModelSpec, OptimizerSpec, PolicyLossSpec, RoleSpec, TeacherHead
from tqppo.workers.student import Student

SPECIAL = (7, 256, 257)  # the first is an ordinary byte, so that it occurs often enough
TOP_K = 5
SAMPLED = ("k1", "abs", "k2", "k3")
LOSSES = (*SAMPLED, "forward_kl_topk", "reverse_kl_topk", "forward_kl", "reverse_kl")
UPDATES = ("supervised", "policy_gradient")
CASES = [(loss, update) for loss in LOSSES for update in UPDATES if (loss, update) != ("k1", "supervised")]
LR_0 = OptimizerSpec(lr=0.0, beta1=0.0, grad_clip=0.0)  # the first moment is the gradient, and the weights stay


@dataclass(frozen=True)
class Class:
    """A student's folder and those of its two teachers, which differ in width and in the tying of their head."""

    student: Path
    teachers: tuple[Path, ...]

    @staticmethod
    def create(folder: Path) -> Class:
        shapes: list[dict[str, Any]] = [
            {"hidden_size": 32, "num_layers": 1},
            {"hidden_size": 48, "num_layers": 1, "tie_embeddings": False},
        ]
        paths = [write_tiny_model(folder / f"teacher{i}", seed=5 + i, **shape) for i, shape in enumerate(shapes)]
        for path in paths:
            _sharpen(path)
        return Class(write_tiny_model(folder / "student", hidden_size=32, num_layers=1, seed=1), tuple(paths))

    def spec(self, loss: str, update: str, *, task: bool = False, **changes: Any) -> RoleSpec:
        features = Features(
            has_policy_loss=task,
            kl_in_loss=task,
            has_teachers=True,
            teacher_top_k=TOP_K if loss.endswith("_topk") else 0,
            teacher_hidden=loss in ("forward_kl", "reverse_kl"),
            distills_by_policy_gradient=update == "policy_gradient",
        )
        heads = tuple(TeacherHead(name, str(path)) for name, path in zip(("sums", "words"), self.teachers, strict=True))
        distill = DistillSpec(loss, update, coef=0.3, special_ids=SPECIAL, teachers=heads)
        policy = PolicyLossSpec(aggregate="token-mean", kl="k2", kl_coef=0.1, entropy_coef=0.01)
        spec = RoleSpec(
            ModelSpec(str(self.student)),
            features,
            LR_0,
            policy,
            distill=distill,
            temperature=0.8,
            micro_batch_tokens=64,
        )
        return replace(spec, **changes)

    def student_of(self, loss: str, update: str, **changes: Any) -> Student:
        student = Student(self.spec(loss, update, **changes))
        student.start()
        return student

    @torch.no_grad()
    def score(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows with everything that teachers may say of them; each row belongs to one teacher in turn."""
        models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in self.teachers]
        sequences = rows["tokens"].unbind()
        scored = [_scored(models[i % 2], tokens) for i, tokens in enumerate(sequences)]
        lengths = torch.tensor([len(tokens) for tokens in sequences])
        taught = {name: to_nested(torch.cat([each[name] for each in scored]), lengths) for name in scored[0]}
        return {**rows, **taught, "teacher_index": torch.arange(len(sequences)) % 2}


def _sharpen(folder: Path) -> None:
    """A new model is nearly indifferent; a teacher knows what it wants."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_output_embeddings().weight.data.mul_(12.0)
    model.save_pretrained(folder)


def _scored(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    states = model.base_model(tokens[None]).last_hidden_state[0]
    logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    best = logprobs.topk(TOP_K, dim=1)
    sampled = torch.zeros(len(tokens), 1)
    sampled[:-1] = logprobs[:-1].gather(1, tokens[1:, None])
    return {
        "teacher_hidden": torch.nn.functional.pad(states, (0, 48 - states.shape[1])),
        "teacher_ids": best.indices.int(),
        "teacher_logprobs": best.values,
        "sampled": sampled,
    }


def columns_for(student: Student, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only what the stage declares to read, as the queue would return it."""
    from tqppo import dataflow

    named = dict(rows)
    if not student.features.teacher_top_k:
        named["teacher_logprobs"] = rows["sampled"]
    return {name: named[name] for name in dataflow.ACTOR_UPDATE.reads(student.features)}


def take(rows: Mapping[str, Tensor], order: Sequence[int], padding: Sequence[int] = ()) -> dict[str, Tensor]:
    """Some of the rows in this order, with padding rows before these places."""
    found = {}
    for name, column in rows.items():
        items = list(column.unbind() if column.is_nested else column)
        length = 2 if name in ("tokens", "sampled") or name.startswith("teacher_") else 1
        neutral = torch.zeros(length, *items[0].shape[1:], dtype=column.dtype) if column.is_nested else items[0] * 0
        chosen = [items[i] for i in order]
        for place in sorted(padding, reverse=True):
            chosen.insert(place, neutral)
        if column.is_nested:
            lengths = torch.tensor([len(item) for item in chosen], dtype=torch.int64)
            found[name] = to_nested(torch.cat([*chosen, neutral[:0]]), lengths)
        else:
            found[name] = torch.stack([*chosen, items[0]])[: len(chosen)]
    return found


def plain_divergence(loss: str, logits: Tensor, tokens: Tensor, theirs: Tensor) -> Tensor:
    """The formulas of every loss on the full logits [n, V] of both models: [n]."""
    log_q, log_p = logits.log_softmax(1), theirs.log_softmax(1)
    own, teacher = (each.gather(1, tokens[:, None])[:, 0] for each in (log_q, log_p))
    d = own - teacher
    if loss in SAMPLED:
        return {"k1": d, "abs": d.abs(), "k2": d.square() / 2, "k3": (-d).exp() + d - 1}[loss]
    if loss.endswith("_topk"):
        best = log_p.topk(TOP_K, dim=1)
        log_p, log_q = best.values, log_q.gather(1, best.indices)
        if loss == "reverse_kl_topk":
            log_p, log_q = (torch.cat([e, (1 - e.exp().sum(1, keepdim=True)).log()], 1) for e in (log_p, log_q))
    if loss.startswith("forward"):
        return (log_p.exp() * (log_p - log_q)).sum(1).clamp(min=0)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def gradient(student: Student) -> dict[str, Tensor]:
    """The gradient of the last update, by `LR_0`."""
    start = "exp_avg."
    return {k.removeprefix(start): v.clone() for k, v in student.optimizer.state().items() if k.startswith(start)}
