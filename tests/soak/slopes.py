"""Whether a figure of a process grows: the least-squares slope over the steps, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LIMITS = {"rss_mb": 1.0, "shm_mb": 1.0, "descriptors": 1.0, "threads": 1.0, "rows": 1.0}  # per 1,000 steps
WARM_UP = 0.25  # of the samples are left out: caches fill, allocators find their size
MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per 1,000 steps, and twice its standard error."""

    per_1000: float
    error: float

    def grows(self, limit: float) -> bool:
        """Whether the growth is over the limit beyond doubt. A figure that jumps up and down does not grow."""
        return self.per_1000 - self.error > limit


def slope(steps: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The slope after the warm-up; None if there are too few samples."""
    skipped = int(len(steps) * WARM_UP)
    x, y = list(steps[skipped:]), list(values[skipped:])
    count = len(x)
    if count < MIN_SAMPLES or max(x) == min(x):
        return None
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((each - mean_x) ** 2 for each in x)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - rise * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(1000 * rise, 2000 * math.sqrt(rest / (count - 2) / spread))
