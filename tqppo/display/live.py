"""A live region that survives a terminal of another size. `display` draws the panel in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

REFRESHES_PER_S = 4
LINES_KEPT = 20


class ResizableLive(Live):
    """Clears the screen when its size changes, and draws again what belongs there.

    rich moves up by the number of lines that it drew. In a narrower terminal they are wrapped and there are more of
    them, so that parts of the old panel would stay.
    """

    def __init__(self, draw: Callable[[], RenderableType], console: Console, above: deque[Text]) -> None:
        super().__init__(
            get_renderable=draw,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )
        self._above = above  # the newest lines that were printed above the region
        self._size = console.size

    def refresh(self) -> None:
        size = self.console.size
        if size != self._size:
            self._size = size
            with self.console:  # one write, so that no half-drawn screen is seen
                self.console.clear()
                for line in list(self._above):
                    self.console.print(line, soft_wrap=True)
        super().refresh()
