"""A tool call as the model asks for it, and a turn of the model as parsers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tqppo.data.dataset import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `error` says why it cannot be made as it was written."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    error: str = ""
    id: str = ""  # names the call in the result that follows; some templates ask for one

    def as_message(self) -> Message:
        """The call as chat templates take it."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn in parts: the text outside of tool calls, and the calls in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()
