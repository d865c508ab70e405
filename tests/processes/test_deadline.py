from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from tqppo.errors import BackendError, DeadlineExceeded
from tqppo.processes.deadline import lock_within, within


def test_a_call_in_time_gives_its_result_or_its_error() -> None:
    assert within(5, lambda: 3, "counting") == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "dividing")


def test_a_call_that_does_not_return_is_named() -> None:
    over = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"Ray's shutdown did not finish within 0.1 s"):
        within(0.1, over.wait, "Ray's shutdown")
    over.set()


def test_a_lock_of_another_holder_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    waits: list[str] = []
    with (tmp_path / "lock").open("w") as holder, (tmp_path / "lock").open("w") as file:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(BackendError, match="the other one took too long"):
            lock_within(0.5, file, BackendError("the other one took too long"), lambda: waits.append("waits"))
        assert waits == ["waits"]
        threading.Timer(0.3, lambda: fcntl.flock(holder, fcntl.LOCK_UN)).start()
        lock_within(20, file, BackendError("never"))
        lock_within(0, file, BackendError("never"), lambda: waits.append("not now"))
        assert waits == ["waits"]
