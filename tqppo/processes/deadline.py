"""Calls of other people's functions that may never return, each with a deadline that names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from tqppo.errors import DeadlineExceeded

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T], what: str) -> T:
    """Return the result of a call, or raise what it raises; DeadlineExceeded after `timeout_s`.

    The call runs in a thread, which stays behind at the deadline, until the process ends.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=what).start()
    try:
        return result.result(timeout_s)
    except FutureTimeout:
        if result.done():  # the call's own TimeoutError
            raise
        raise DeadlineExceeded(f"{what} did not finish within {timeout_s:g} s") from None
