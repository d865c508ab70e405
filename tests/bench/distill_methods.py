"""The ways to learn that `distill.py` compares: their settings, their runs, and how far each had come at which cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from harness import cpu_seconds
from transformers import AutoModelForCausalLM, PreTrainedModel

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, Demonstration, demonstrations
from tqppo.processes.hosting import Launcher
from tqppo.run.build import build
from tqppo.run.folder import new_run
from tqppo.run.live import LiveRun
from tqppo.tiny import warm_start
from tqppo.tiny.model import TinyShape
from tqppo.tiny.tokenizer import byte_tokenizer

SCORE = "val-core/sort/acc/mean@1"
PRIVILEGED = "{prompt}\nReference: {answer}"
SHAPE: TinyShape = {"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": True}
WARM_STEPS, PLAIN_SHARE = 100, 20  # one demonstration in so many has no reference, so that sorting is left to learn


@dataclass(frozen=True)
class Method:
    """How to learn, and for how long at most. `rows` are sampled a step; each of `epochs` has updates of `update_rows`.

    Every method is validated about 20 to 60 times, so that none has more luck with the noise of a validation.
    """

    settings: tuple[str, ...]
    lr: float
    rows: int
    update_rows: int
    max_steps: int
    validate_every: int  # steps
    epochs: int = 1
    preset: str = "base-tiny"
    teacher: str = "grpo"  # or `student`: the initial weights, with a prompt that holds the answer

    @property
    def updates_per_step(self) -> int:
        return self.rows // self.update_rows * self.epochs

    @property
    def description(self) -> str:
        passes = f", {self.epochs} passes" if self.epochs > 1 else ""
        return f"lr {self.lr:g}, {self.rows} rows a step, updates of {self.update_rows}{passes}"


def following(loss: str, *more: str, teacher: str = "grpo") -> Method:
    """Rows are sampled and scored once and learned from twice: an update costs less, and hardly more are needed.

    The rate falls to a fifth over 40 steps, and stays there.
    """
    settings = [f"distillation.loss={loss}", "distillation.batch_rows=160", "actor.beta2=0.99", *more]
    settings += ["run.max_steps=40", "actor.schedule=linear", "actor.min_lr_ratio=0.2"]
    return Method(tuple(settings), 3e-3, 160, 160, 80, 2, epochs=2, teacher=teacher)


TOP_16 = "distillation.top_k=16"
SAMPLED = ("distillation.loss=k1", "distillation.update=policy_gradient", "distillation.batch_rows=256")
METHODS = {
    "grpo": Method((), 1e-3, 256, 128, 400, 10, preset="quickstart"),
    "sampled": Method(SAMPLED, 1e-3, 256, 256, 240, 4),
    "top-k": following("reverse_kl_topk", TOP_16),
    "full": following("forward_kl"),
    "self": following("forward_kl_topk", TOP_16, teacher="student"),
    "sft": Method((), 2e-3, 256, 256, 240, 4),
}
MEANING = {
    "grpo": "the quickstart preset from these weights",
    "sampled": "teacher's log-probability of the sampled token, k1, policy gradient",
    "top-k": "teacher's 16 likeliest tokens, reverse KL",
    "full": "whole vocabulary by hidden states, forward KL",
    "self": "the initial weights with the answer in their prompt, top-16, forward KL",
    "sft": "cross-entropy on the teacher's own answers, a bare loop in one process",
}


@dataclass
class Curve:
    """Held-out accuracy over a run, and what it cost until then."""

    updates: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, updates: int, cpu_s: float, found: float) -> None:
        self.updates.append(updates)
        self.cpu_s.append(cpu_s)
        self.scores.append(found)

    def reached(self, target: float) -> int | None:
        """The place of the first validation with this score."""
        return next((place for place, found in enumerate(self.scores) if found >= target), None)


# -- the initial weights -----------------------------------------------------------------------------------------------


def with_reference(example: Demonstration) -> Demonstration:
    """The demonstration as a self-teacher's prompt has it."""
    messages, answer = example
    *before, last = messages
    asked = PRIVILEGED.format(prompt=last["content"], answer=answer)
    return [*before, {**last, "content": asked}], answer


def initial_weights(seed: int, folder: Path) -> Path:
    """A model that copies a reference and hardly sorts, so that one start serves every method."""
    plain = demonstrations(DataSpec.of(compiled("base-tiny").data), seed=seed)
    shown = [each if i % PLAIN_SHARE == 0 else with_reference(each) for i, each in enumerate(plain)]
    return warm_start.prepare(folder, model=SHAPE, demonstrations=shown, steps=WARM_STEPS, seed=seed)


# -- runs of tqppo -----------------------------------------------------------------------------------------------------


def compiled(preset: str, *settings: str) -> Config:
    compilation = compile_config(preset, overrides=list(settings), environ={})
    assert compilation.config is not None, compilation.diagnostics
    return compilation.config


def config_of(method: Method, seed: int, start: Path, teacher: Path | None, *further: str) -> Config:
    settings = [f'model.path="{start}"', f"run.seed={seed}", f"actor.lr={method.lr}", f"actor.epochs={method.epochs}"]
    if teacher is not None:
        settings += ["mode=distill", f"data.batch_size={method.rows}", "rollout.group_size=1"]
        settings += [f"actor.mini_batch_size={method.update_rows}"]
        path, prompt = ("student", PRIVILEGED) if method.teacher == "student" else (str(teacher), "")
        settings += [f'teachers.one.path="{path}"', f"teachers.one.prompt={toml_string(prompt)}"]
    return compiled(method.preset, *settings, *method.settings, *further)


def toml_string(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


@contextmanager
def live(config: Config, scratch: Path, name: str, launcher: Launcher) -> Iterator[LiveRun]:
    """The parts of a run, built as `tqppo train` builds them."""
    with ExitStack() as stack:
        folder = new_run(scratch / "runs", name, preset="", model="")
        yield build(
            config,
            folder,
            folder.next_attempt(),
            stack,
            lambda text: nullcontext(lambda line: None),
            launcher=launcher,
        )


def train(run: LiveRun, method: Method, target: float | None) -> Curve:
    """Train until the target, or to the end without one."""
    curve, cpu_s = Curve(), 0.0
    curve.add(0, 0.0, run.validate()[SCORE])
    for step in range(1, method.max_steps + 1):
        began = cpu_seconds()
        run.trainer.step(step)
        cpu_s += cpu_seconds() - began
        if step % method.validate_every == 0:
            curve.add(step * method.updates_per_step, cpu_s, run.validate()[SCORE])
            if target is not None and curve.scores[-1] >= target:
                break
    return curve


# -- supervised training on the teacher's answers ----------------------------------------------------------------------


class Supervised:
    """Cross-entropy on answers that the teacher samples for the step's prompts, in this process."""

    def __init__(self, seed: int, start: Path, teacher: Path, method: Method) -> None:
        torch.manual_seed(seed)
        self.method, self.tokenizer = method, byte_tokenizer()
        data = DataSpec.of(compiled("base-tiny").data)
        self.prompts = demonstrations(data, seed=seed)
        self.held_out = [demonstrations(data, seed=seed, held_out=True)[i] for i in range(512)]
        self.student, self.teacher = load(start), load(teacher)
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=method.lr, betas=(0.9, 0.95), weight_decay=0.01
        )

    def train(self, target: float) -> Curve:
        curve, cpu_s = Curve(), 0.0
        curve.add(0, 0.0, self.accuracy())
        for step in range(1, self.method.max_steps + 1):
            began = cpu_seconds()
            self.step(step)
            cpu_s += cpu_seconds() - began
            if step % self.method.validate_every == 0:
                curve.add(step * self.method.updates_per_step, cpu_s, self.accuracy())
                if curve.scores[-1] >= target:
                    break
        return curve

    def step(self, step: int) -> None:
        rows, size = self.method.rows, self.method.update_rows
        asked = [self.prompts[i % len(self.prompts)] for i in range((step - 1) * rows, step * rows)]
        answers = self.answers(self.teacher, asked)
        taught = [(messages, answer) for (messages, _), answer in zip(asked, answers, strict=True)]
        for begin in range(0, rows, size):
            tokens, labels = warm_start.batch(self.tokenizer, taught[begin : begin + size])
            self.optimizer.zero_grad()
            self.student(input_ids=tokens, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
            self.optimizer.step()

    def accuracy(self) -> float:
        answers = self.answers(self.student, self.held_out)
        return statistics.mean(answer == right for answer, (_, right) in zip(answers, self.held_out, strict=True))

    @torch.no_grad()
    def answers(self, model: PreTrainedModel, asked: Sequence[Demonstration]) -> list[str]:
        """Sampled at temperature 1; all prompts of the task have the same length."""
        prompts = [
            str(self.tokenizer.apply_chat_template(cast(Any, messages), tokenize=False, add_generation_prompt=True))
            for messages, _ in asked
        ]
        tokens = self.tokenizer(prompts, add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = cast(Any, model).generate(
            tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8,
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return self.tokenizer.batch_decode(made[:, tokens.shape[1] :], skip_special_tokens=True)


def load(folder: Path) -> PreTrainedModel:
    open_model: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    return open_model(folder, dtype=torch.float32)
