"""Charts made of characters, and short forms of numbers and durations. `panel` and `display` use them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
PALETTE = ("#5b8ff9", "#61ddaa", "#f6bd16", "#e8684a", "#9270ca", "#6dc8ec", "#ff9d4d", "#269a99")
COLD, WARM = (66, 99, 235), (55, 214, 122)  # the chart's colours at its bottom and top


def sparkline(values: Sequence[float], width: int = 16, *, blocks: str = BLOCKS) -> str:
    """The values as one line of at most `width` characters, scaled to their range; a flat line is at the bottom."""
    points = resample([value for value in values if math.isfinite(value)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((point - low) * scale)] for point in points)


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: the means of equal stretches."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def area(
    values: Sequence[float], *, width: int, height: int, top: float, bottom: float, blocks: str = BLOCKS
) -> list[list[tuple[str, str]]]:
    """Rows from top to bottom, each a list of (character, colour); one column per value, in eighths of a line."""
    steps = len(blocks)
    scale = height * steps / (top - bottom) if top > bottom else 0.0
    levels = [max(0, round((value - bottom) * scale)) if math.isfinite(value) else 0 for value in values[-width:]]
    rows = []
    for row in range(height):
        under = (height - 1 - row) * steps
        color = blend(1 - row / max(height - 1, 1))
        cells = [(blocks[min(level - under, steps) - 1] if level > under else " ", color) for level in levels]
        rows.append(cells + [(" ", color)] * (width - len(cells)))
    return rows


def blend(share: float) -> str:
    """A colour between COLD (0) and WARM (1), as rich writes it."""
    mixed = [round(cold + (warm - cold) * share) for cold, warm in zip(COLD, WARM, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def shares(seconds: Mapping[str, float], *, most: int = 5) -> list[tuple[str, float]]:
    """(stage, share of the time), largest first; small shares are summed up as `other`."""
    total = math.fsum(seconds.values())
    if total <= 0:
        return []
    ranked = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    found = [(name, value / total) for name, value in ranked[:most] if value / total >= 0.02]
    rest = 1.0 - math.fsum(share for _, share in found)
    return [*found, ("other", rest)] if rest >= 0.005 else found


def widths(parts: Sequence[float], width: int) -> list[int]:
    """Integer widths that add up to `width`, as close to the shares as possible."""
    edges, total = [0], 0.0
    for part in parts:
        total += part
        edges.append(round(width * total))
    return [b - a for a, b in pairwise(edges)]


def number(value: float) -> str:
    """A number with about three significant digits: 0.00123 → 1.2e-03, 12345 → 12.3k."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e4:
        unit = next((name, factor) for name, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if size >= factor)
        return f"{value / unit[1]:.1f}{unit[0]}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.01 or size == 0:
        return f"{value:.3f}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
