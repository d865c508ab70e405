"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second aborts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Aborted(BaseException):
    """Raised by the second signal. Not an `Exception`, so that no handler but clean-up code catches it."""


class StopRequest:
    """Handles signals during a run. `number` is the signal that asked for a stop; 0 if none did."""

    def __init__(self, on_first: Callable[[str], None]) -> None:
        self.number = 0
        self.on_first = on_first
        self.before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def __enter__(self) -> StopRequest:
        try:
            self._listen()
        except Aborted:  # two signals may come between the lines of `_listen`
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def listen_again(self) -> None:
        """Install the handlers again, after Ray has replaced them: its own end the process at once on SIGTERM."""
        self._listen()

    def ignore(self) -> None:
        """Ignore further signals while the run is being taken down."""
        for number in SIGNALS if _is_main_thread() else ():
            signal.signal(number, signal.SIG_IGN)

    def _listen(self) -> None:
        """Install the handlers if this is the main thread; other threads receive no signals."""
        for number in SIGNALS if _is_main_thread() else ():
            self.before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.ignore()
            raise Aborted
        self.number = number
        self.on_first(signal.Signals(number).name)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
