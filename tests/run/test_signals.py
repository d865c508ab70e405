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


def test_a_run_in_the_background_of_a_script_receives_sigint_too() -> None:
    """Shells start background jobs of scripts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(lambda name: None) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.exit_code == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
