"""Tries a config's teachers for `validate-config --probe`: the student samples answers, each teacher scores its own.

Engines run inside this process or as servers of their own, without Ray, one after the other.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from tqppo import plugins
from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, Prompt
from tqppo.data.prompts import load as load_prompts
from tqppo.doctor.logprobs import engine_spec, hide_progress_bars
from tqppo.engines.together import generate_together
from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineSpec, Request, RolloutEngine, Scores
from tqppo.rollout.teachers.privileged import own_prompt
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.run import configure
from tqppo.run.build import prepare_model
from tqppo.run.configure import RunPaths
from tqppo.run.teachers import task_rows
from tqppo.tiny.teachers import TeacherProgress, cache_folder, make_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 2  # that each teacher scores
LOOKED_AT = 500  # rows of each source, to find some of each teacher
AGREEMENT = 1e-3  # between two scores of the same tokens by one engine, in nats


@dataclass(frozen=True, slots=True)
class StudentAnswer:
    """A prompt, and what the student answered."""

    prompt: Prompt
    completion: Completion


@dataclass(frozen=True, slots=True)
class TeacherTrial:
    """What one teacher said of the student's answers. `divergence` is log q − log p, the mean over tokens."""

    name: str
    rows: int
    tokens: int
    divergence: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"teacher {self.name} scored {self.tokens} tokens of {self.rows} answers in {self.seconds:.1f} s; "
            f"divergence of the student: {self.divergence:+.3f} nats per token"
        )


def try_teachers(config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[TeacherTrial]:
    """Each teacher's trial. Raises a `TqppoError` for an engine that does not start or does not score."""
    hide_progress_bars()
    chosen = {name: prompts_of(config, tokenizer, name) for name in config.teachers}
    with tempfile.TemporaryDirectory(prefix="tqppo-probe-") as folder:
        student = prepare_model(config, Path(folder) / "model")
        engine = engine_spec(config, student, tokenizer, Path(folder) / "logs")
        asked = [prompt for prompts in chosen.values() for prompt in prompts]
        answers = iter(asyncio.run(_sample(config, engine, asked)))
        for name, prompts in chosen.items():
            spec = teacher_engine(config, name, student, Path(folder) / "logs")
            mine = [StudentAnswer(prompt, next(answers)) for prompt in prompts]
            if mine:
                yield asyncio.run(_trial(config, name, spec, mine, tokenizer))


def prompts_of(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> list[Prompt]:
    """The first prompts that a teacher scores."""
    match = config.teachers[name].match
    by_source = config.distillation.route_by == config.data.source_key
    found: list[Prompt] = []
    for source in facts.data_sources(config):
        loaded = load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed, sources=[source])
        for place in range(min(LOOKED_AT, len(loaded))):
            prompt = loaded.fit(loaded.prompt(place))
            if prompt is None:
                continue
            value = prompt.source if by_source else str(prompt.column(config.distillation.route_by))
            found += [prompt] if not match or value in match else []
            if len(found) == ROWS:
                return found
    return found


def teacher_engine(config: Config, name: str, student: str, logs: Path) -> EngineSpec:
    """The engine as a run starts it: the teacher's model is found, or made for its task."""
    path = config.teachers[name].path
    if name in facts.student_teachers(config):
        path = student
    elif name in facts.task_teachers(config):
        task = facts.task_teachers(config)[name]
        recipe = configure.teacher_recipe(config)
        path = make_teacher(task, recipe, task_rows(config, task), cache_folder(), _ignore)
    paths = RunPaths(student, student, logs, publish="", teachers={name: path})
    spec = configure.teacher_engine(config, paths, name)
    endpoints = config.teachers[name].endpoints
    return replace(spec, endpoint=endpoints[0]) if endpoints else spec


def _ignore(progress: TeacherProgress) -> None:
    """A probe shows no progress."""


async def _sample(config: Config, spec: EngineSpec, prompts: Sequence[Prompt]) -> list[Completion]:
    engine: RolloutEngine = plugins.load("rollout", config.rollout.backend)(spec)
    sampling = configure.sampling(config)
    try:
        await engine.start()
        requests = [Request(each.tokens, sampling, i, f"probe-{i}", (i,)) for i, each in enumerate(prompts)]
        return await generate_together(engine, requests)
    finally:
        await engine.close()


async def _trial(
    config: Config, name: str, spec: EngineSpec, answers: Sequence[StudentAnswer], tokenizer: PreTrainedTokenizerBase
) -> TeacherTrial:
    features, template = facts.features(config), config.teachers[name].prompt
    engine: RolloutEngine = plugins.load("rollout", config.teachers[name].backend)(spec)
    chat = ChatTemplate(cast(Tokenizer, tokenizer))
    began = time.monotonic()
    own: list[float] = []
    theirs: list[float] = []
    try:
        await engine.start()
        for each in answers:
            is_chat = config.data.chat_template
            prompt = own_prompt(template, each.prompt, chat, is_chat=is_chat) if template else each.prompt.tokens
            tokens, start = [*prompt, *each.completion.tokens], len(prompt) - 1
            first, second = [
                await engine.score(tokens, features.teacher_top_k, start=start, hidden=features.teacher_hidden)
                for _ in range(2)
            ]
            _compare(name, first, second, start)
            theirs += first.logprobs[start:-1].tolist()
            own += each.completion.logprobs
    finally:
        await engine.close()
    divergence = float(np.mean(np.subtract(own, theirs))) if own else 0.0
    return TeacherTrial(name, len(answers), len(own), divergence, time.monotonic() - began)


def _compare(name: str, first: Scores, second: Scores, start: int) -> None:
    """Raises `EngineError` if two scores of the same tokens differ, or are not numbers."""
    difference = np.abs(first.logprobs[start:] - second.logprobs[start:]).max(initial=0.0)
    if not np.isfinite(first.logprobs[start:]).all() or not difference <= AGREEMENT:
        raise EngineError(f"teacher {name} scores the same tokens differently: by up to {difference:.3g} nats")
