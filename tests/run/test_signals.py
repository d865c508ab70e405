"""The first signal asks, the second aborts."""

from __future__ import annotations

import os
import signal

import pytest

from tqppo.run.signals import Aborted, StopRequest


def test_the_first_signal_is_remembered_and_the_second_aborts() -> None:
    seen: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(seen.append) as stop:
        assert stop.number == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, stop.exit_code, seen) == (signal.SIGTERM, 143, ["SIGTERM"])
        with pytest.raises(Aborted):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_exits_with_130() -> None:
    with StopRequest(lambda name: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 130
