"""Waits that may never end, each with a deadline that names it: other people's functions, locks of other processes."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, TypeVar

from tqppo.errors import DeadlineExceeded, TqppoError

LOCK_POLL_S = 0.2

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


def lock_within(
    timeout_s: float, file: IO[str], late: TqppoError, on_wait: Callable[[], object] = lambda: None
) -> None:
    """Take the lock of an open file. If another process holds it, call `on_wait` and wait; raise `late` in the end."""
    deadline, waits = time.monotonic() + timeout_s, False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise late from None
        if not waits:
            on_wait()
        waits = True
        time.sleep(LOCK_POLL_S)
