"""Sessions of a model outside a run: the config's engine and agent loop in this process, without Ray.

`tqppo eval`, `chat` and `sample` ask it for answers.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import cast

from tqppo import plugins
from tqppo.data.files import digest
from tqppo.data.layout import Message, Row
from tqppo.data.prompts import DataSpec, Prompt, PromptSet
from tqppo.doctor.logprobs import engine_spec, hide_progress_bars
from tqppo.doctor.models import OpenedModel
from tqppo.doctor.tokenizers import load_tokenizer
from tqppo.metrics.validation import Answer
from tqppo.protocols import RolloutEngine, Sampling
from tqppo.rewards.scorer import Scorer, ScorerSpec
from tqppo.rollout.loops.base import AgentLoop, load_loop
from tqppo.rollout.session import Session
from tqppo.rollout.slots import SessionSlots, all_or_none
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.run import configure

AT_ONCE = 256  # sessions that play at a time, unless the config says fewer


@dataclass(frozen=True, slots=True)
class QuestionRows:
    """Questions as a dataset: texts, or conversations so far."""

    questions: Sequence[str | list[Message]]

    def __len__(self) -> int:
        return len(self.questions)

    def row(self, index: int) -> Row:
        return Row(self.questions[index], None, "prompt")

    def where(self, index: int) -> str:
        return f"prompt {index + 1}"

    def fingerprint(self) -> str:
        return digest(list(self.questions))


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """The answer of one session, and the reward that its agent loop gave, if it gives one."""

    prompt: Prompt
    text: str
    num_tokens: int
    finish: str
    reward: float | None
    is_greedy: bool


class ModelSessions:
    """A context manager: inside it the engine is up and answers prompts."""

    def __init__(self, model: OpenedModel) -> None:
        hide_progress_bars()
        self.config = config = model.config
        self.tokenizer = load_tokenizer(
            config.model.tokenizer or model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._chat = ChatTemplate(cast(Tokenizer, self.tokenizer))
        self._logs = tempfile.TemporaryDirectory(prefix="tqppo-sessions-")
        self._spec = engine_spec(config, model.path, self.tokenizer, Path(self._logs.name))
        self._engine: RolloutEngine = plugins.load("rollout", config.rollout.backend)(self._spec)
        arguments = {name: configure.with_full_paths(value) for name, value in config.rollout.agent_args.items()}
        self._loop = load_loop(plugins.absolute(config.rollout.agent), arguments)
        self._events = asyncio.new_event_loop()

    def __enter__(self) -> ModelSessions:
        try:
            self._events.run_until_complete(self._start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._events.run_until_complete(self._end())
        self._events.close()
        self._logs.cleanup()

    def prompts(self, questions: Sequence[str | list[Message]]) -> list[Prompt]:
        """Questions rendered like the prompts of the dataset."""
        rendered = PromptSet(QuestionRows(questions), self.tokenizer, DataSpec.of(self.config.data), prefix="given")
        return rendered.prompts([(0, index) for index in range(len(questions))])

    def answers(
        self, prompts: Sequence[Prompt], *, samples: int = 1, greedy: bool = False, temperature: float | None = None
    ) -> list[SessionAnswer]:
        """`samples` sampled answers to each prompt, and with `greedy` the likeliest one."""
        sampling = configure.sampling(self.config, temperature=temperature)
        likeliest = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        ways = [*((number, sampling) for number in range(samples)), *([(samples, likeliest)] if greedy else [])]
        places = enumerate(prompts)
        wanted = [(prompt, self._session((place, way[0]), prompt, way[1])) for place, prompt in places for way in ways]
        return self._events.run_until_complete(self._together(wanted))

    def _session(self, order: tuple[int, int], prompt: Prompt, sampling: Sampling) -> Session:
        return Session(
            self._engine,
            sampling,
            seed_parts=(self.config.run.seed, "eval", 0, prompt.uid, order[1]),
            order=order,
            chat_template=self._chat,
            max_context_tokens=self._spec.max_context_tokens,
        )

    async def _together(self, wanted: Sequence[tuple[Prompt, Session]]) -> list[SessionAnswer]:
        limit = self.config.rollout.max_sessions or AT_ONCE
        slots = SessionSlots(self._engine, [llm.name for _, llm in wanted], batch="eval", limit=limit)
        return await all_or_none(self._one(prompt, llm, slots) for prompt, llm in wanted)

    async def _one(self, prompt: Prompt, llm: Session, slots: SessionSlots) -> SessionAnswer:
        async with slots.playing(llm.name):
            last = (await self._loop.run(prompt, llm))[-1]
        text = self._chat.decode(last.response_tokens, special=False) if last.answer is None else last.answer
        return SessionAnswer(
            prompt, text, len(last.response_tokens), last.finish, last.reward, llm.sampling.temperature == 0
        )

    async def _start(self) -> None:
        if isinstance(self._loop, AgentLoop):
            await self._loop.start(self._chat)
        await self._engine.start()

    async def _end(self) -> None:
        await self._engine.close()
        if isinstance(self._loop, AgentLoop):
            await self._loop.close()


def scored(answers: Sequence[SessionAnswer], spec: ScorerSpec) -> list[Answer]:
    """The answers with their rewards, for the figures of a validation."""
    scorer = Scorer(spec)
    try:
        return asyncio.run(_scored(answers, scorer))
    finally:
        scorer.close()


async def _scored(answers: Sequence[SessionAnswer], scorer: Scorer) -> list[Answer]:
    return list(await asyncio.gather(*(_score(each, scorer) for each in answers)))


async def _score(each: SessionAnswer, scorer: Scorer) -> Answer:
    prompt = each.prompt
    if each.reward is not None:
        return Answer(prompt.uid, prompt.source, each.reward, {}, each.text, each.is_greedy)
    reward = await scorer.score(
        prompt.source,
        each.text,
        prompt.answer,
        prompt.extra,
        prompt=prompt.question,
        transcript=prompt.text + each.text,
        response_tokens=each.num_tokens,
    )
    prediction = each.text if reward.prediction is None else reward.prediction
    return Answer(prompt.uid, prompt.source, reward.score, reward.metrics, prediction, each.is_greedy)
