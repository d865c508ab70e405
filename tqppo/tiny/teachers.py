"""Makes a tiny teacher for a procedural task: a model of the student's shape and tokenizer that has learned the task.

Distillation with `path = "task:NAME"` uses it, so that a laptop needs no download. A finished teacher stays in the
user's cache, and later runs find it there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tqppo.errors import DeadlineExceeded, PreflightError
from tqppo.processes.deadline import lock_within
from tqppo.tiny.model import save, write_tiny_model
from tqppo.tiny.tokenizer import byte_tokenizer
from tqppo.tiny.warm_start import IGNORED, Demonstrations, batch, quiet_on_one_thread

MARKER = "tqppo_teacher.json"  # written last: a folder without it is not a finished teacher
HELD_OUT_PROBLEMS = 512
OTHERS_TIMEOUT_S = 2 * 3600.0  # for another process that makes the same one, which takes minutes on one core
METHOD = 1  # counts changes of the training that no field of the recipe shows, so that cached teachers are retrained


@dataclass(frozen=True, slots=True)
class TeacherRecipe:
    """The model's shape and its supervised training. A change of the training that no field shows counts up `METHOD`.

    `learned` is the share of right answers, over the last batches, at which the learning rate begins to fall;
    `least_accuracy` the share of held-out problems that a finished teacher solves.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    tie_embeddings: bool
    batch_size: int = 128
    lr: float = 4e-3
    warmup_steps: int = 20
    cooling_steps: int = 100
    max_steps: int = 1500
    learned: float = 0.97
    last_batches: int = 10
    seed: int = 0
    least_accuracy: float = 0.95


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """Functions that open a task's training and held-out problems in the process that trains."""

    training: Callable[[], Demonstrations]
    held_out: Callable[[], Demonstrations]


@dataclass(frozen=True, slots=True)
class TeacherProgress:
    """How far the training is: the share of right answers over the last batches decides when it ends."""

    step: int
    accuracy: float


ReportProgress = Callable[[TeacherProgress], None]


def cache_folder() -> Path:
    """Where teachers are kept: `TQPPO_TEACHERS`, or a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TQPPO_TEACHERS") or Path(cache) / "tqppo" / "teachers").expanduser()


def find_teacher(task: str, recipe: TeacherRecipe, rows: TaskSplit, folder: Path) -> str | None:
    """The folder of a finished teacher below `folder`; None if it is yet to be made."""
    place = _place(folder, task, _made_from(task, recipe, rows.training()))
    return str(place) if (place / MARKER).is_file() else None


def make_teacher(task: str, recipe: TeacherRecipe, rows: TaskSplit, folder: Path, report: ReportProgress) -> str:
    """The folder of the task's teacher below `folder`; it is trained unless an equal one is there already.

    Two runs that need the same teacher at once train it once: the second waits for the first.
    """
    training = rows.training()
    made_from = _made_from(task, recipe, training)
    place = _place(folder, task, made_from)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{place.name}.lock"):
        if not (place / MARKER).is_file():
            _make(place, recipe, training, rows.held_out(), made_from, report)
    return str(place)


def _place(folder: Path, task: str, made_from: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{task}-{digest}"


def _made_from(task: str, recipe: TeacherRecipe, training: Demonstrations) -> dict[str, object]:
    """Everything that determines the teacher's weights.

    The first problems stand for the task's arguments, its code and the rendering.
    """
    first = hashlib.sha256(json.dumps([training[i] for i in range(min(8, len(training)))]).encode()).hexdigest()
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {
        "method": METHOD,
        "task": task,
        "recipe": asdict(recipe),
        "rows": len(training),
        "first": first,
        "versions": versions,
    }


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the lock. The kernel releases it when its holder ends, however it ends."""
    late = DeadlineExceeded(f"another process has been making this teacher for {OTHERS_TIMEOUT_S:g} s; see {path}")
    with path.open("w") as file:
        lock_within(OTHERS_TIMEOUT_S, file, late)
        yield


def _make(
    place: Path,
    recipe: TeacherRecipe,
    training: Demonstrations,
    held_out: Demonstrations,
    made_from: dict[str, object],
    report: ReportProgress,
) -> None:
    """Train in a folder beside `place` that is renamed at the end. The caller holds the lock."""
    work = place.with_name(f".{place.name}")
    for leftover in (work, place):  # of an attempt that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with quiet_on_one_thread():
            model = _fresh(work, recipe)
            steps = _train(model, recipe, training, report)
            accuracy = held_out_accuracy(model, held_out)
            _refuse_poor(str(made_from["task"]), recipe, accuracy, steps)
            save(model, work)
        marker = {"made_from": made_from, "steps": steps, "accuracy": accuracy}
        (work / MARKER).write_text(json.dumps(marker, indent=1))
        work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fresh(folder: Path, recipe: TeacherRecipe) -> PreTrainedModel:
    write_tiny_model(
        folder,
        family=recipe.family,
        hidden_size=recipe.hidden_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        tie_embeddings=recipe.tie_embeddings,
        seed=recipe.seed,
    )
    load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32)


def _train(model: PreTrainedModel, recipe: TeacherRecipe, training: Demonstrations, report: ReportProgress) -> int:
    """Train until the answers are right, then a little longer at a falling rate; returns the number of steps."""
    tokenizer = byte_tokenizer()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(recipe.seed).permutation(len(training))
    last: deque[float] = deque(maxlen=recipe.last_batches)
    end = recipe.max_steps
    step = 0
    while step < end:
        optimizer.param_groups[0]["lr"] = recipe.lr * _rate(step, end, recipe)
        places = np.arange(step * recipe.batch_size, (step + 1) * recipe.batch_size) % len(order)
        tokens, labels = batch(tokenizer, [training[int(i)] for i in order[places]])
        output = model(input_ids=tokens, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        last.append(_right(output.logits.detach(), labels).float().mean().item())
        accuracy = sum(last) / len(last)
        if len(last) == recipe.last_batches and accuracy >= recipe.learned:
            end = min(end, step + recipe.cooling_steps)
        report(TeacherProgress(step, accuracy))
    return step


def _rate(step: int, end: int, recipe: TeacherRecipe) -> float:
    """The share of the learning rate at a step: rises at first, falls over the last steps."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (end - step) / recipe.cooling_steps)


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Which rows have every answer token as the likeliest one, [B]; logits are [B, T, V], labels [B, T]."""
    wanted = labels[:, 1:]
    return ((logits[:, :-1].argmax(-1) == wanted) | (wanted == IGNORED)).all(1)


@torch.no_grad()
def held_out_accuracy(model: PreTrainedModel, held_out: Demonstrations) -> float:
    """The share of problems that greedy decoding solves. One forward is enough: all tokens before must be right too."""
    was_training = model.training
    model.train(False)
    problems = [held_out[i] for i in range(min(HELD_OUT_PROBLEMS, len(held_out)))]
    tokens, labels = batch(byte_tokenizer(), problems)
    right = _right(model(input_ids=tokens).logits, labels)
    model.train(was_training)
    return right.float().mean().item()


def _refuse_poor(task: str, recipe: TeacherRecipe, accuracy: float, steps: int) -> None:
    if accuracy < recipe.least_accuracy:
        raise PreflightError(
            f"the teacher made for task:{task} solves only {accuracy:.0%} of held-out problems after {steps} steps, "
            f"and a teacher should solve {recipe.least_accuracy:.0%}; make the task easier (data.task_args), the model "
            "larger (model.hidden_size), or name a trained model in teachers.NAME.path"
        )
