"""`chat` and `sample`: what a trained model says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.evaluate import RunOrModel
from tqppo.cli.options import AsJson, Overrides
from tqppo.cli.output import emit_json, say
from tqppo.errors import UsageError

if TYPE_CHECKING:
    from tqppo.data.layout import Message
    from tqppo.doctor.models import OpenedModel
    from tqppo.doctor.sessions import ModelSessions

Greedy = Annotated[bool, typer.Option("--greedy", help="Take the likeliest tokens instead of samples.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="NUMBER", min=0.0, help="Sampling temperature. Default: the run's."),
]


def sample(
    run: RunOrModel,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="What to ask. Repeatable; - reads lines of stdin."),
    ],
    samples: Annotated[int, typer.Option("--samples", "-k", metavar="N", min=1, help="Answers to each prompt.")] = 1,
    greedy: Greedy = False,
    temperature: Temperature = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print a trained model's answers to prompts."""
    questions = [line for each in prompt for line in (sys.stdin.read().splitlines() if each == "-" else [each])]
    if not any(questions):
        raise UsageError("sample needs something to ask: --prompt TEXT")
    from tqppo.doctor.models import opened

    with opened(run, overrides or ()) as model, _sessions(model) as sessions:
        is_greedy = greedy or temperature == 0
        answers = sessions.answers(
            sessions.prompts(questions), samples=0 if is_greedy else samples, greedy=is_greedy, temperature=temperature
        )
    if as_json:
        emit_json([{"prompt": questions[each.prompt.index], "answer": each.text} for each in answers])
        return
    for each in answers:
        say(f"{questions[each.prompt.index]} → {each.text}" if len(answers) > 1 else each.text)


def chat(
    run: RunOrModel,
    greedy: Greedy = False,
    temperature: Temperature = None,
    single: Annotated[bool, typer.Option("--single", help="Forget each question before the next.")] = False,
    overrides: Overrides = None,
) -> None:
    """Talk to a trained model.

    An empty line or Ctrl-D ends the chat.
    """
    say("loading the model …", err=True)
    from tqppo.doctor.models import opened

    with opened(run, overrides or ()) as model, _sessions(model) as sessions:
        say(f"{model.name}; an empty line ends the chat", err=True)
        is_greedy = greedy or temperature == 0
        _talk(sessions, is_greedy=is_greedy, temperature=temperature, forgets=single)


def _sessions(model: OpenedModel) -> ModelSessions:
    """Loads torch, so that a name that is no model is an error before that."""
    from tqppo.doctor.sessions import ModelSessions

    return ModelSessions(model)


def _talk(sessions: ModelSessions, *, is_greedy: bool, temperature: float | None, forgets: bool) -> None:
    system = sessions.config.data.system_prompt
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while question := _ask():
        messages.append({"role": "user", "content": question})
        (answer,) = sessions.answers(
            sessions.prompts([messages]), samples=0 if is_greedy else 1, greedy=is_greedy, temperature=temperature
        )
        say(answer.text)
        messages = list(start) if forgets else [*messages, {"role": "assistant", "content": answer.text}]


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
