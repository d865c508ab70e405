"""The console of panels and tables: text of any origin holds nothing that the terminal obeys."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tqppo.untrusted import printable


class SafeConsole(Console):
    """rich's console. Colours and cursor movements are rich's own; escapes within texts are shown instead of obeyed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
