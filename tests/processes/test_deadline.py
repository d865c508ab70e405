from __future__ import annotations

import threading

import pytest

from tqppo.errors import DeadlineExceeded
from tqppo.processes.deadline import within


def test_a_call_in_time_gives_its_result_or_its_error() -> None:
    assert within(5, lambda: 3, "counting") == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "dividing")


def test_a_call_that_does_not_return_is_named() -> None:
    over = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"Ray's shutdown did not finish within 0.1 s"):
        within(0.1, over.wait, "Ray's shutdown")
    over.set()
