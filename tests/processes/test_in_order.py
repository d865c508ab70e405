"""Work that is done in order, on a thread of its own or at once, and what becomes of its errors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from tqppo.errors import EngineError
from tqppo.processes.hosting import Call, failing_with, settle
from tqppo.processes.in_order import AtOnce, Background


def fails() -> None:
    raise EngineError("gone")


def test_work_is_done_in_the_order_in_which_it_was_given() -> None:
    done: list[int] = []
    background = Background("test")
    futures = [background.submit(lambda i=i: (time.sleep(0.01 * (3 - i)), done.append(i))) for i in range(3)]  # type: ignore[misc]
    futures[-1].result(10)
    assert done == [0, 1, 2]
    background.stop()
    background.join()


def test_after_a_failure_no_more_work_is_done_and_all_of_it_fails_alike() -> None:
    done: list[str] = []
    background = Background("test")
    first, second = background.submit(fails), background.submit(lambda: done.append("second"))
    for future in (first, second, background.failure):
        with pytest.raises(EngineError, match="gone"):
            future.result(10)
    assert done == []
    background.stop()
    background.join()


def test_work_that_was_not_begun_when_it_is_stopped_is_not_begun() -> None:
    may_end, begun = threading.Event(), threading.Event()
    background = Background("test")
    background.submit(lambda: (begun.set(), may_end.wait(10)))
    late = background.submit(fails)
    assert begun.wait(10)
    background.stop()
    may_end.set()
    background.join()
    with pytest.raises(FutureTimeout):
        late.result(0)
    assert not background.failure.done()


def test_work_at_once_raises_where_it_is_submitted() -> None:
    assert AtOnce().submit(lambda: threading.current_thread()).result(0) is threading.current_thread()
    with pytest.raises(EngineError, match="gone"):
        AtOnce().submit(fails)


def test_a_wait_for_calls_ends_at_once_with_the_error_of_work_elsewhere() -> None:
    background = Background("test")
    never: Call[None] = Call(Future(), lambda: None)
    with failing_with(background.failure):
        background.submit(lambda: (time.sleep(0.1), fails()))
        began = time.monotonic()
        with pytest.raises(EngineError, match="gone"):
            settle([never], 60.0)
        assert time.monotonic() - began < 1.5  # and not at the next look
    assert settle([never], 0.01).pending == (0,)
    background.stop()
    background.join()
