"""Plays one session for `tqppo agent try`: the config's engine and agent loop in this process, without Ray."""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from tqppo import plugins
from tqppo.config.sections import Config
from tqppo.data.dataset import Row, digest
from tqppo.data.prompts import DataSpec, Prompt, PromptSet
from tqppo.data.prompts import load as load_prompts
from tqppo.doctor.logprobs import engine_spec
from tqppo.errors import DataError, TqppoError
from tqppo.protocols import RolloutEngine
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.loops.base import AgentLoop, RunsSessions, load_loop
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.trajectory import Trajectory
from tqppo.run import configure
from tqppo.run.build import prepare_model


class SessionFailed(TqppoError):
    """The agent loop raised an error."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to play: a question and its answer, or a prompt of the dataset by its index."""

    text: str = ""
    answer: str = ""
    index: int = 0
    session: int = 0
    is_greedy: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring response tokens with one mask: a turn of the model, or what it was shown."""

    is_sampled: bool
    tokens: list[str]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PlayedTrajectory:
    prompt: str
    prompt_tokens: int
    segments: list[Segment]
    finish: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class PlayedSession:
    """One session as text. `reward` is None where no answer is known and the loop gives none."""

    trajectories: list[PlayedTrajectory]
    answer: str
    reward: float | None
    counts: dict[str, float]


@dataclass(frozen=True, slots=True)
class _OneRow:
    """A dataset with one question."""

    question: str
    answer: str

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> Row:
        return Row(self.question, self.answer, "prompt")

    def where(self, index: int) -> str:
        return "--prompt"

    def fingerprint(self) -> str:
        return digest([self.question, self.answer])


def play(config: Config, wanted: Wanted, announce: Callable[[str], None] = lambda what: None) -> PlayedSession:
    """Make the model if it is a tiny one, start the engine, play the session, and take everything down."""
    disable_bars: Callable[[], None] = logging.disable_progress_bar
    disable_bars()
    announce("making the model" if config.model.path == "tiny" else "finding the model")
    with tempfile.TemporaryDirectory(prefix="tqppo-agent-") as folder:
        model = prepare_model(config, Path(folder) / "model")
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.tokenizer or model, trust_remote_code=config.model.trust_remote_code
        )
        prompt = find_prompt(config, wanted, tokenizer)
        args = {name: configure.with_full_paths(value) for name, value in config.rollout.agent_args.items()}
        loop = load_loop(plugins.absolute(config.rollout.agent), args)
        spec = engine_spec(config, model, tokenizer, Path(folder) / "logs")
        engine: RolloutEngine = plugins.load("rollout", config.rollout.backend)(spec)
        announce(f"starting the {config.rollout.backend} engine and playing the session")
        sampling = configure.sampling(config)
        llm = Session(
            engine,
            replace(sampling, temperature=0.0, top_p=1.0, top_k=0) if wanted.is_greedy else sampling,
            seed_parts=(config.run.seed, "try", 0, prompt.uid, wanted.session),
            order=(0, wanted.session),
            chat_template=ChatTemplate(cast(Tokenizer, tokenizer)),
            max_context_tokens=spec.max_context_tokens,
        )
        return asyncio.run(_play(config, prompt, llm, loop, scored=not wanted.text or bool(wanted.answer)))


def find_prompt(config: Config, wanted: Wanted, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The question as the dataset's prompts are rendered, or a prompt of the dataset."""
    spec = DataSpec.of(config.data)
    if wanted.text:
        prompts = PromptSet(_OneRow(wanted.text, wanted.answer), tokenizer, spec, prefix="try")
    else:
        prompts = load_prompts(spec, tokenizer, seed=config.run.seed)
    if wanted.index >= len(prompts):
        raise DataError(f"there is no prompt {wanted.index}: the dataset has {len(prompts)}")
    found = prompts.fit(prompts.prompt(wanted.index))
    if found is None:
        raise DataError(f"{prompts.where(wanted.index)}: the prompt is longer than data.max_prompt_tokens")
    return found


async def _play(config: Config, prompt: Prompt, llm: Session, loop: RunsSessions, *, scored: bool) -> PlayedSession:
    try:
        if isinstance(loop, AgentLoop):
            await loop.start(llm.chat)
        await llm.engine.start()
        trajectories = await _session(prompt, llm, loop)
        answer = _answer(trajectories[-1], llm.chat)
        reward = trajectories[-1].reward
        if reward is None and scored:
            reward = await _score(config, prompt, answer, num_tokens=len(trajectories[-1].response_tokens))
        shown = [_shown(each, llm.chat) for each in trajectories]
        return PlayedSession(shown, answer, reward, llm.totals(trajectories))
    finally:
        await llm.engine.close()
        if isinstance(loop, AgentLoop):
            await loop.close()


async def _session(prompt: Prompt, llm: Session, loop: RunsSessions) -> list[Trajectory]:
    try:
        trajectories = await loop.run(prompt, llm)
    except TqppoError:
        raise
    except Exception as error:  # a loop of the user can raise anything
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f"{last.filename}:{last.lineno}"
        raise SessionFailed(f"the session failed: {type(error).__name__}: {error} ({where})") from error
    if not trajectories:
        raise SessionFailed("the agent loop returned no trajectories")
    return trajectories


async def _score(config: Config, prompt: Prompt, answer: str, *, num_tokens: int) -> float:
    scorer = Scorer(ScorerSpec.of(config.reward, max_new_tokens=config.rollout.max_new_tokens))
    try:
        scored = await scorer.score(
            prompt.source, answer, prompt.answer, prompt.extra, prompt=prompt.question, response_tokens=num_tokens
        )
        return scored.score
    finally:
        scorer.close()


def _answer(last: Trajectory, chat: ChatTemplate) -> str:
    return chat.decode(last.response_tokens, special=False) if last.answer is None else last.answer


def _shown(trajectory: Trajectory, chat: ChatTemplate) -> PlayedTrajectory:
    return PlayedTrajectory(
        prompt=chat.decode(trajectory.prompt_tokens),
        prompt_tokens=len(trajectory.prompt_tokens),
        segments=list(segments(trajectory, chat)),
        finish=trajectory.finish,
        metrics=dict(trajectory.metrics),
    )


def segments(trajectory: Trajectory, chat: ChatTemplate) -> Iterator[Segment]:
    """The response in turns and observations. Two turns without an observation between them are two segments."""
    ends = set(trajectory.turn_ends)
    number = 0
    marks = []
    for i, is_sampled in enumerate(trajectory.response_mask):
        marks.append((number, is_sampled))
        number += i + 1 in ends
    places = zip(marks, trajectory.response_tokens, trajectory.logprobs, strict=True)
    for (_, is_sampled), run in groupby(places, key=lambda place: place[0]):
        rows = list(run)
        yield Segment(is_sampled, [chat.decode([token]) for _, token, _ in rows], [logprob for _, _, logprob in rows])


def render(played: PlayedSession, echo: Callable[[str], None]) -> None:
    """Print the session turn by turn; the log-probability of each sampled token stands behind it."""
    turn = 0
    for number, trajectory in enumerate(played.trajectories, 1):
        echo(f"trajectory {number} of {len(played.trajectories)}")
        echo(f"  prompt ({trajectory.prompt_tokens} tokens, no loss)")
        echo(_indented(trajectory.prompt))
        for segment in trajectory.segments:
            turn += segment.is_sampled
            echo(_heading(segment, turn))
            echo(_indented("".join(segment.tokens)))
            if segment.is_sampled:
                pairs = zip(segment.tokens, segment.logprobs, strict=True)
                echo(_indented("  ".join(f"{token!r} {logprob:.2f}" for token, logprob in pairs)))
        echo(f"  ended by {trajectory.finish}{_figures(trajectory.metrics)}")
    reward = "unknown: give --answer" if played.reward is None else f"{played.reward:g}"
    echo(f"answer {played.answer!r}, reward {reward}{_figures(played.counts)}")


def _heading(segment: Segment, turn: int) -> str:
    num_tokens = f"{len(segment.tokens)} token{'s' * (len(segment.tokens) != 1)}"
    if not segment.is_sampled:
        return f"  observation ({num_tokens}, no loss)"
    return f"  turn {turn} ({num_tokens}, trained on, log-probability {sum(segment.logprobs):.2f})"


def _figures(metrics: dict[str, float]) -> str:
    return "".join(f", {name} {value:g}" for name, value in sorted(metrics.items()))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
