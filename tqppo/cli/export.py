"""`export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqppo.cli.output import say
from tqppo.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name (its newest checkpoint), or a checkpoint's folder.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where to write the model.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the LoRA adapter alone, as peft loads it.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Number type.")] = "float32",
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    `transformers` loads it; it has the tokenizer too. LoRA adapters are merged, or written alone with --adapter.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: there is {', '.join(DTYPES)}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} is there already: name a new folder")
    from tqppo.doctor.models import saved_actor

    saved = saved_actor(checkpoint)
    from tqppo.doctor.logprobs import hide_progress_bars

    hide_progress_bars()
    saved.export(to, adapter=adapter, dtype=dtype)
    say(f"wrote {to}: step {saved.checkpoint.step} of {saved.run.name}")
