"""The panel of a run, drawn again from its files. `tqppo runs show --panel` prints it. No torch."""

from __future__ import annotations

import io
import math
import re

from rich.console import Console
from rich.terminal_theme import MONOKAI

from tqppo.display.panel import panel
from tqppo.display.progress import Progress
from tqppo.errors import UsageError
from tqppo.metrics import files as metrics_files
from tqppo.run.folder import RunFolder
from tqppo.run.summary import max_steps, setting

EXAMPLE = "example"  # the event that holds a prompt with the model's answer and its reward
SVG_WIDTH = 100


def progress_of(run: RunFolder) -> Progress:
    """The run's progress as its panel showed it last. The time is the sum of its steps."""
    lines = metrics_files.read(run.metrics) if run.metrics.is_file() else []
    if not any(line["step"] for line in lines):
        raise UsageError(f"{run.path} has no panel yet: it has not completed a step")
    about = [setting(run, name) for name in ("mode", "model.path", "rollout.backend")]
    progress = Progress(run.name, subtitle=subtitle(*map(str, about)), max_steps=max_steps(run))
    progress.recall(lines)
    progress.stop_clock(math.fsum(line.get("timing_s/step") or 0.0 for line in lines))
    progress.example = str(metrics_files.last_event(run.events, EXAMPLE).get("text", ""))
    return progress


def subtitle(mode: str, model: str, backend: str) -> str:
    return f"{mode} · {model} · {backend}"


def panel_svg(progress: Progress) -> str:
    """The panel as a picture that loads nothing from elsewhere: without the web fonts that rich would name."""
    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(panel(progress, width=SVG_WIDTH))
    drawn = console.export_svg(title=f"tqppo runs show {progress.title} --panel", theme=MONOKAI, unique_id="panel")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
