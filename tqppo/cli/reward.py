"""`reward try`: scores of a reward function on rows of a dataset."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tqppo.cli.compiling import compile_or_exit
from tqppo.cli.options import AsJson, ConfigFiles, Overrides, Preset
from tqppo.cli.output import emit_json, table
from tqppo.errors import DataError, UsageError

app = typer.Typer(no_args_is_help=True, help="Try reward functions.")
SHOWN = 40


@app.callback()
def root() -> None:
    """Try reward functions."""


@app.command("try")
def try_function(
    function: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FUNCTION]...", help="A built-in name or file.py:function. Default: reward.function."),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", metavar="SOURCE", help="A file, a pattern, hub:NAME or task:NAME.")
    ] = "",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            metavar="TEXT",
            help="An answer to score. Repeatable. Default: the reference, and an empty one.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Rows to try.")] = 3,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the scores of a reward function on rows.

    The answers are the rows' references, or yours (--answer). Ends with exit code 1 if the function fails on one.
    """
    given = [f"data.train={data}"] if data else []
    given += [f"reward.function={json.dumps(function)}"] if function else []
    if not (data or preset or config):
        raise UsageError("reward try needs rows: --data FILE, --preset NAME or --config FILE")
    settings = compile_or_exit(preset, config, [*(overrides or []), *given], may_be_bare=bool(data))
    from tqppo.data import prompts
    from tqppo.doctor.rewards import try_reward
    from tqppo.doctor.tokenizers import load_tokenizer
    from tqppo.rewards.scorer import ScorerSpec

    tokenizer = load_tokenizer(settings.model.tokenizer or settings.model.path)
    loaded = prompts.load(prompts.DataSpec.of(settings.data), tokenizer, seed=settings.run.seed)
    chosen = [(loaded.where(index), loaded.prompt(index)) for index in range(min(rows, len(loaded)))]
    reward = settings.reward.model_copy(update={"on_error": "zero"})
    spec = ScorerSpec.of(reward, max_new_tokens=settings.rollout.max_new_tokens)
    tried = try_reward(spec, chosen, answer or [""], references=not answer)
    if as_json:
        emit_json([asdict(each) for each in tried])
    else:
        header = ("row", "answer", "score", "seconds", "further")
        table(header, [_cells(asdict(each)) for each in tried])
    if failures := [each.failure for each in tried if each.failure]:
        raise DataError(failures[0])


def _cells(tried: dict[str, object]) -> list[str]:
    answer = json.dumps(tried["answer"], ensure_ascii=False)
    shown = answer if len(answer) <= SHOWN else f"{answer[: SHOWN - 1]}…"
    metrics = tried["metrics"]
    further = ", ".join(f"{name} {value:g}" for name, value in metrics.items()) if isinstance(metrics, dict) else ""
    score = "failed" if tried["failure"] else f"{tried['score']:g}"
    return [str(tried["where"]), shown, score, f"{tried['seconds']:.3f}", further]
