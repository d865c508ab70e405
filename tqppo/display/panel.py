"""Draws the live panel of a run with rich. A pure function of its `Progress`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tqppo.display.charts import BLOCKS, PALETTE, area, duration, number, resample, shares, sparkline, widths
from tqppo.display.progress import Progress

NARROW = 64  # a narrower terminal shows one line instead of a panel
WIDE = 140  # from here on curves are longer, and the chart is higher
CHART_HEIGHT = 5
CURVE_WIDTH = 10
LABEL_WIDTH, VALUE_WIDTH = 11, 8
AXIS_WIDTH = 6


def panel(progress: Progress, *, width: int, activity: str = "", blocks: str = BLOCKS) -> RenderableType:
    if width < NARROW:
        return _line(progress, activity, blocks)
    inner = width - 4
    parts: list[RenderableType] = [_bar(progress, inner), Text(""), _curves(progress, inner, blocks)]
    if validations := _validations(progress):
        parts += [Text(""), validations]
    if progress.example:
        parts.append(Text(progress.example, style="dim", no_wrap=True, overflow="ellipsis"))
    if stages := _stages(progress, inner):
        parts += [Text(""), stages]
    title = Text.assemble((" tqppo ", "bold white"), (f"{progress.title} ", "cyan"))
    below = Text(f" {activity or progress.subtitle} ", style="white dim")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=below,
        subtitle_align="right",
        width=width,
        box=box.ROUNDED if blocks is BLOCKS else box.ASCII,
        border_style="bright_black",
        padding=(0, 1),
    )


def _curves(progress: Progress, width: int, blocks: str) -> Table:
    """The chart of the reward, and beside it the other figures; a wide terminal gives room to both."""
    is_wide = width + 4 >= WIDE
    height = 2 * CHART_HEIGHT if is_wide else CHART_HEIGHT
    curve_width = 3 * CURVE_WIDTH if is_wide else CURVE_WIDTH
    figures_width = LABEL_WIDTH + VALUE_WIDTH + curve_width + 3
    chart_width = width - figures_width - AXIS_WIDTH - 3
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(width=chart_width + AXIS_WIDTH)
    table.add_column(width=figures_width)
    chart = _chart(progress, chart_width, height, blocks)
    table.add_row(chart, _figures(progress, height + 1, curve_width, blocks))
    return table


def _bar(progress: Progress, width: int) -> Text:
    """The progress bar: step 84/250 ━━━━━━╸──────  0:31 · 1:02 left."""
    share = progress.step / progress.max_steps if progress.max_steps else 0.0
    head = f"step {progress.step}/{progress.max_steps} "
    tail = f" {share:4.0%}  {duration(progress.elapsed)}"
    if progress.step < progress.max_steps:
        tail += f" · {duration(progress.seconds_left)} left"
    room = max(width - len(head) - len(tail), 4)
    done = round(room * share)
    return Text.assemble((head, "bold"), ("━" * done, "green"), ("━" * (room - done), "bright_black"), tail)


def _chart(progress: Progress, width: int, height: int, blocks: str) -> Text:
    """The reward over the whole run; the empty part on the right stands for the steps still to come."""
    text = Text(no_wrap=True)
    last = f"{number(progress.reward[-1])}" if progress.reward else "–"
    text.append("reward ", "dim").append(last, "bold green")
    text.append(f"  from {number(progress.reward[0])}\n" if progress.reward else "\n", "dim")
    filled = width if not progress.max_steps else max(1, round(width * progress.step / progress.max_steps))
    points = _spread(progress.reward, filled)
    top, bottom = _range(progress.reward)
    for row, cells in enumerate(area(points, width=width, height=height, top=top, bottom=bottom, blocks=blocks)):
        label = f"{top:.3g}" if row == 0 else f"{bottom:.3g}" if row == height - 1 else ""
        text.append(f"{label[: AXIS_WIDTH - 1]:>{AXIS_WIDTH - 1}} ", "dim")
        text.append("".join(char for char, _ in cells), cells[0][1])
        text.append("\n" if row < height - 1 else "")
    return text


def _spread(values: list[float], width: int) -> list[float]:
    """Exactly `width` points: means where there are more values, repeats where there are fewer."""
    if not values:
        return []
    if len(values) >= width:
        return resample(values, width)
    return [values[i * len(values) // width] for i in range(width)]


def _range(values: list[float]) -> tuple[float, float]:
    """(top, bottom) of the chart. Rewards between 0 and 1 use that whole range, so that heights are comparable."""
    if not values:
        return 1.0, 0.0
    low, high = min(values), max(values)
    return (1.0, 0.0) if low >= 0.0 and 0.2 <= high <= 1.0 else (high, min(low, 0.0))


def _figures(progress: Progress, most: int, curve_width: int, blocks: str) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", width=LABEL_WIDTH)
    table.add_column(justify="right", width=VALUE_WIDTH)
    table.add_column(style="blue", width=curve_width)
    for label, value in progress.figures()[:most]:
        table.add_row(label, value, sparkline(progress.history.get(label, []), curve_width, blocks=blocks))
    return table


def _validations(progress: Progress) -> RenderableType | None:
    shown = [each for each in progress.validations() if "best@" not in each.name and "maj@" not in each.name]
    if not shown:
        return None
    table = Table.grid(padding=(0, 1, 0, 0))
    for each in shown[:6]:
        style = "bold green" if each.last > each.first else "bold"
        now = Text(f"{each.last:.3f}", style=style)
        if each.has_change:
            now = Text.assemble(f"{each.first:.3f}", (" → ", "dim"), now)
        table.add_row(Text(each.name, style="dim"), now, Text(f"step {each.step}", style="dim"))
    return table


def _stages(progress: Progress, width: int) -> RenderableType | None:
    """The time of the last steps by stage: a bar of shares and its legend."""
    parts = shares(progress.stage_seconds())
    if not parts:
        return None
    bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
    sizes = widths([share for _, share in parts], width)
    for i, ((name, share), size) in enumerate(zip(parts, sizes, strict=True)):
        color = PALETTE[i % len(PALETTE)] if name != "other" else "bright_black"
        bar.append("▄" * size, color)
        legend.append("  " if i else "").append("■ ", color).append(f"{name} {share:.0%}", "dim")
    return Group(bar, legend)


def _line(progress: Progress, activity: str, blocks: str) -> Text:
    text = Text(f"{progress.step}/{progress.max_steps} ", no_wrap=True, overflow="ellipsis")
    if progress.reward:
        text.append(f"reward {number(progress.reward[-1])} ", "green")
        text.append(sparkline(progress.reward, 10, blocks=blocks), "green")
    return text.append(f" {duration(progress.seconds_left)} left {activity}", "dim")
