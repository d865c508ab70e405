from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tqppo.processes import stillness
from tqppo.processes.stillness import Activity, Stillness, activity

BUSY = "while True: pass"
HOLDS_THE_LOCK = """
import re, threading, time
def beat():
    while True:
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
re.match(r"(a+)+$", "a" * 60 + "b")  # one call that never returns, and no other Python code runs meanwhile
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", request.param])
    time.sleep(0.5)
    yield started.pid
    started.kill()
    started.wait()


@pytest.mark.parametrize("process", [BUSY, HOLDS_THE_LOCK], indirect=True)
def test_a_process_that_computes_is_not_still_and_one_that_is_stopped_is(
    process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillness, "STILL_S", 1.0)
    watched = Stillness()
    for _ in range(8):
        assert watched.look(activity(process)) == ""
        time.sleep(0.2)
    os.kill(process, signal.SIGSTOP)
    deadline, found = time.monotonic() + 10, ""
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        found = watched.look(activity(process))
    assert "none of its threads has run for 1 s (stopped)" in found


def test_a_process_that_has_ended_has_no_activity() -> None:
    ended = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert activity(ended.pid) is None  # a zombie
    ended.wait()
    assert activity(ended.pid) is None


def test_a_look_after_a_suspension_of_the_one_that_looks_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stillness.time, "monotonic", lambda: now[0])
    watched, asleep = Stillness(), Activity(5, "SS")
    for _ in range(3):
        now[0] += 3600
        assert watched.look(asleep) == ""
    for _ in range(10):
        now[0] += stillness.LOOK_S
        said = watched.look(asleep)
    assert said
    assert watched.look(Activity(6, "SS")) == ""
