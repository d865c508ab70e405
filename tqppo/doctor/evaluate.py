"""Scores a run or a model on prompts, for `tqppo eval`: mean, best and majority of k answers, by source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, Prompt, for_validation
from tqppo.data.prompts import load as load_prompts
from tqppo.doctor.models import opened
from tqppo.metrics.validation import Answer, figures
from tqppo.rewards.scorer import ScorerSpec

if TYPE_CHECKING:
    from tqppo.doctor.sessions import ModelSessions, SessionAnswer


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with an answer of the model and its reward."""

    prompt: str
    answer: str
    reference: object
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures by name (`source/variable/figure`), and a few prompts with their answers."""

    model: str
    num_prompts: int
    samples: int
    figures: dict[str, float]
    examples: list[Example]


def evaluate_model(
    name: str,
    *,
    data: str | Sequence[str] = "",
    num_prompts: int = 0,
    samples: int = 0,
    overrides: Sequence[str] = (),
    examples: int = 3,
    announce: Callable[[str], None] = lambda what: None,
) -> Evaluation:
    """Answer the prompts of `data`, or of the run's validation, and score the answers with the run's reward."""
    announce("finding the model")
    with opened(name, overrides) as model:
        config = model.config
        announce(f"starting the {config.rollout.backend} engine with {model.name}")
        from tqppo.doctor.sessions import ModelSessions, scored  # loads torch: a wrong name is an error before that

        with ModelSessions(model) as sessions:
            chosen = prompts_of(config, sessions, data, num_prompts or config.validation.num_prompts)
            k = samples or config.validation.samples
            announce(f"answering {len(chosen)} prompts, {k} sampled and 1 greedy each")
            answers = sessions.answers(chosen, samples=k, greedy=True, temperature=config.validation.temperature)
        spec = ScorerSpec.of(config.reward, max_new_tokens=config.rollout.max_new_tokens)
        rated = scored(answers, spec)
    greedy = [(a, r) for a, r in zip(answers, rated, strict=True) if a.is_greedy]
    return Evaluation(model.name, len(chosen), k, named_figures(rated), [_example(*each) for each in greedy[:examples]])


def prompts_of(config: Config, sessions: ModelSessions, data: str | Sequence[str], num_prompts: int) -> list[Prompt]:
    """The first prompts of the data: as given, else those of the validation, else those of the training."""
    spec, seed = DataSpec.of(config.data), config.run.seed
    held_out = for_validation(spec, sessions.tokenizer, seed=seed, sources=data or config.validation.data)
    return (held_out or load_prompts(spec, sessions.tokenizer, seed=seed)).first(num_prompts)


def named_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Main figures first, without the prefixes of a run's metrics; over all sources too if there are several."""
    found = figures(answers)
    if len({each.source for each in answers}) > 1:
        found = figures([replace(each, source="all") for each in answers]) | found
    core = {name.partition("/")[2]: value for name, value in found.items() if name.startswith("val-core/")}
    return core | {name.partition("/")[2]: value for name, value in found.items() if name.startswith("val-aux/")}


def _example(answer: SessionAnswer, rated: Answer) -> Example:
    return Example(answer.prompt.text, answer.text, answer.prompt.answer, rated.score)
