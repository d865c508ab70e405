"""Shows a run while it starts, trains and ends: a live panel on a terminal, plain lines elsewhere. Imports no torch.

`step` only stores the metrics. rich's own thread redraws the terminal a few times a second, so that a step costs well
under a millisecond.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tqppo import space
from tqppo.display.charts import ASCII_BLOCKS, BLOCKS, duration, number, sparkline
from tqppo.display.console import SafeConsole
from tqppo.display.live import LINES_KEPT, ResizableLive
from tqppo.display.panel import panel
from tqppo.display.progress import Progress, Validated

ANNOUNCE_AFTER_S = 1.0  # without a terminal, a stage that takes longer gets a line
PROGRESS_EVERY_S = 10.0  # without a terminal, the progress of a stage gets a line this often
MENTION_AFTER_S = 0.5  # on a terminal, a stage that took longer leaves a line
PLAIN_LINES = 30  # about this many step lines over a run of quick steps
SLOW_STEP_S = 2.0  # steps slower than this get a plain line each


@dataclass(frozen=True, slots=True)
class Ending:
    """The content of the last lines: how the run ended, where its files are (label → path), and what to type next."""

    headline: str
    places: Mapping[str, str]
    next_commands: Sequence[tuple[str, str]] = ()  # (command, what it does)


class Display:
    """A context manager that restores the terminal however the run ends."""

    def __init__(
        self, title: str, *, subtitle: str = "", max_steps: int = 0, quiet: bool = False, console: Console | None = None
    ) -> None:
        self.console = console or SafeConsole(highlight=False)
        self.progress = Progress(title=title, subtitle=subtitle, max_steps=max_steps)
        self._quiet = quiet
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._blocks = BLOCKS if "utf" in self.console.encoding.lower() else ASCII_BLOCKS
        self._live: ResizableLive | None = None
        self._above: deque[Text] = deque(maxlen=LINES_KEPT)
        self._stages: list[tuple[str, float]] = []

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show that something is under way, such as "starting Ray". Stages may be nested, and used during training.

        Yields a function that shows how far it is, such as "step 120".
        """
        started = time.monotonic()
        place = len(self._stages)
        self._stages.append((name, started))
        late = threading.Timer(ANNOUNCE_AFTER_S, self._plain, [f"{name} …"])
        late.daemon = True
        if not self._is_live:
            late.start()
        self._refresh()
        done = False
        try:
            yield self._shows_progress(place, name)
            done = True
        finally:
            late.cancel()
            self._stages.pop()
            self._stage_ended(name, time.monotonic() - started, done)

    def _shows_progress(self, place: int, name: str) -> Callable[[str], None]:
        """Replaces the stage's text on a terminal; elsewhere prints a line now and then."""
        said = [time.monotonic()]

        def show(text: str) -> None:
            self._stages[place] = (f"{name}: {text}", self._stages[place][1])
            if not self._is_live and time.monotonic() - said[0] >= PROGRESS_EVERY_S:
                said[0] = time.monotonic()
                self._plain(f"{name}: {text}")

        return show

    def recall(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Take in the lines of metrics.jsonl before a resume, so that curves begin at the run's first step."""
        self.progress.recall(rows)
        self.progress.restart_clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a finished step; step 0 is the validation before the first."""
        self.progress.add(step, metrics)
        if self._is_live:
            self._refresh()
        elif not self._quiet and self._gets_a_line(step, metrics):
            self._print(self._line())

    def note(self, text: str, *, style: str = "") -> None:
        """Print a line above the panel, such as "checkpoint saved"."""
        if not self._quiet:
            self._print(Text(text, style=style))

    def warn(self, text: str) -> None:
        """Print a warning; quiet runs show it too."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def finish(self, ending: Ending) -> None:
        """Print the summary: validation before → after, the run's files, the next commands."""
        last = self._frame() if self._is_live and self.progress.steps else None
        self.close()
        if self._quiet:
            return
        if last is not None:
            self._print(last, soft_wrap=False)
        for part in self._ending(ending):
            self._print(part, soft_wrap=isinstance(part, Text))

    def close(self) -> None:
        """Stop redrawing and show the cursor again. May be called at any time, any number of times."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _refresh(self) -> None:
        if self._is_live and self._live is None:
            self._live = ResizableLive(self._frame, self.console, self._above)
            self._live.start()

    def _frame(self) -> RenderableType:
        """The current content of the terminal; rich's thread calls this."""
        stages = list(self._stages)
        activity = f"{stages[-1][0]} …" if stages else ""
        if self.progress.steps:
            return panel(self.progress, width=self.console.width, activity=activity, blocks=self._blocks)
        if not stages:
            return Text("")
        name, started = stages[-1]
        return Spinner("dots", Text(f"{name} … {duration(time.monotonic() - started)}"), style="cyan")

    def _stage_ended(self, name: str, seconds: float, done: bool) -> None:
        if self._quiet or (done and seconds < (MENTION_AFTER_S if self._is_live else ANNOUNCE_AFTER_S)):
            return
        if self.progress.steps and done:
            return  # during training the panel and the step's timings show it
        mark, style = ("✓", "green") if done else ("✗", "red")
        if self._blocks is ASCII_BLOCKS:
            mark = "ok" if done else "failed"
        self._print(Text.assemble((mark, style), " ", name, (f"  {seconds:.1f} s", "dim")))

    def _print(self, part: RenderableType, *, soft_wrap: bool = True) -> None:
        """Print, and keep lines for a terminal that changes its size. A full disk does not end the run."""
        if isinstance(part, Text):
            self._above.append(part)
        try:
            self.console.print(part, soft_wrap=soft_wrap)
        except OSError as error:
            if error.errno not in space.FULL:
                raise

    def _plain(self, text: str) -> None:
        if not self._quiet:
            self._print(Text(text))

    def _gets_a_line(self, step: int, metrics: Mapping[str, float]) -> bool:
        most = self.progress.max_steps
        every = max(1, most // PLAIN_LINES)
        is_slow = self.progress.seconds_per_step >= SLOW_STEP_S
        is_validation = any(name.startswith("val-core/") for name in metrics)
        return is_slow or is_validation or step in (1, most) or step % every == 0

    def _line(self) -> Text:
        progress = self.progress
        parts = [f"step {progress.step}/{progress.max_steps}"]
        if curve := sparkline(progress.reward, 12, blocks=self._blocks):
            parts.append(f"reward {number(progress.reward[-1])} {curve}")
        parts += [f"{label} {value}" for label, value in progress.figures()]
        if progress.step and progress.step < progress.max_steps:
            parts.append(f"eta {duration(progress.seconds_left)}")
        parts += [f"{each.name} {each.last:.3f}" for each in progress.fresh_validation()]
        return Text("  ".join(parts))

    def _ending(self, ending: Ending) -> Iterator[RenderableType]:
        arrow = "→" if self._blocks is BLOCKS else "->"
        yield Text(f"\n{ending.headline}", style="bold")
        if validated := self.progress.validations():
            yield _comparison(validated, arrow)
        if self.progress.example:
            yield Text(f"\n{self.progress.example}")
        yield Text("")
        for label, place in ending.places.items():
            yield Text.assemble((f"{label:<12}", "dim"), place)
        if ending.next_commands:
            yield Text("\nnext", style="dim")
        for command, purpose in ending.next_commands:
            yield Text.assemble("  ", (command, "cyan"), (f"  # {purpose}", "dim"))


def _comparison(validated: Sequence[Validated], arrow: str) -> Table:
    """Before → after. With a single validation there is no after: its figures stand alone, with their step."""
    first, last = validated[0].first_step, validated[0].step
    before = "before" if first == 0 else f"step {first}"
    has_change = any(each.has_change for each in validated)
    after = ("", f"step {last}", "change") if first else ("", "after", "change")
    table = Table(box=None, padding=(0, 3, 0, 0), show_edge=False)
    for heading in ("held-out", before if first or has_change else "before training", *(after if has_change else ())):
        table.add_column(heading, justify="left" if heading in ("held-out", "") else "right", header_style="dim")
    for each in validated:
        if not has_change:
            table.add_row(each.name, f"{each.last:.3f}")
            continue
        style = "green" if each.last > each.first else "red" if each.last < each.first else ""
        change = Text(f"{each.last - each.first:+.3f}", style=style)
        table.add_row(each.name, f"{each.first:.3f}", arrow, Text(f"{each.last:.3f}", style="bold"), change)
    return table
