"""`eval`: scores of a run or a model on prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tqppo.cli.options import AsJson, Overrides
from tqppo.cli.output import emit_json, say, table

RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run's name, a checkpoint's folder, a model's folder or hub name.")
]


def evaluate(
    run: RunOrModel,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="SOURCE", help="A file, pattern, hub:NAME or task:NAME. Repeatable. Default: the run's."
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", metavar="N", min=1, help="Prompts to answer. Default: the run's.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-k", metavar="N", min=1, help="Answers to each. Default: the run's.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score a run or a model on prompts.

    Prints mean, best and majority scores of the answers, by source. A run is evaluated with its own settings:
    validation data, reward, agent loop and engine. Starts no Ray.
    """
    from tqppo.doctor.evaluate import evaluate_model

    found = evaluate_model(
        run,
        data=data or "",
        num_prompts=prompts or 0,
        samples=samples or 0,
        overrides=overrides or (),
        announce=lambda what: say(f"{what} …", err=True),
    )
    if as_json:
        emit_json(asdict(found))
        return
    for each in found.examples:
        say(f"{each.prompt!r} → {each.answer!r}, reward {each.reward:g}")
    say("")
    rows = [name.rsplit("/", 2) for name in found.figures]
    values = found.figures.values()
    table(("source", "score", "figure", "value"), [[*r, f"{v:.3f}"] for r, v in zip(rows, values, strict=True)])
    say(f"\n{found.model}: {found.num_prompts} prompts, {found.samples} sampled and 1 greedy answer each")
