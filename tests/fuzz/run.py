"""Runs the cases of one target, and judges them: an error in our words or none, in little time and memory."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Protocol

from tqppo.errors import TqppoError

MAX_CASE_S = 10.0
MAX_GROWTH_BYTES = 1 << 30
STUCK_S = 60.0  # after which code that takes no signals ends the process, with its stack


class Target(Protocol):
    """What reads one kind of file or text. A case is made of `rng` alone, so that it can be made again."""

    name: str

    def make(self, rng: random.Random) -> None:
        """Write the case into the folder, in place of the one before."""

    def read(self) -> None:
        """Read the case as tqppo does. TqppoError is a refusal; any other error is a finding."""

    def close(self) -> None: ...


class Hang(BaseException):
    """A case took longer than it may; no `except Exception` holds this up."""


@dataclass
class Findings:
    """What the cases of a target gave: `problems` by the first line of each, with the case's number and its stack."""

    name: str
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    growth_bytes: int = 0
    problems: dict[str, tuple[int, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, error: BaseException) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {str(error)[:160]!a}"
        place = what.partition(": ")[0]
        self.counts[place] += 1
        if self.counts[place] == 1:
            self.problems[what] = (number, "".join(traceback.format_exception(error)))


def run(target: Target, seed: int, numbers: range) -> Findings:
    """Run some cases of a target and close it."""
    found, begin, before = Findings(target.name), monotonic(), _peak_bytes()
    try:
        for number in numbers:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            _run_case(target, random.Random(f"{target.name}-{seed}-{number}"), number, found)
    finally:
        faulthandler.cancel_dump_traceback_later()
        target.close()
    found.seconds = monotonic() - begin
    found.growth_bytes = _peak_bytes() - before
    if found.growth_bytes > MAX_GROWTH_BYTES:
        found.problems[f"the process grew by {found.growth_bytes >> 20} MB"] = (numbers[-1], "")
    return found


def _run_case(target: Target, rng: random.Random, number: int, found: Findings) -> None:
    target.make(rng)
    found.cases += 1
    try:
        with limited(MAX_CASE_S), contextlib.redirect_stdout(io.StringIO()):
            target.read()
    except TqppoError as error:
        found.refused += 1
        if not str(error).strip():
            found.add(number, AssertionError("an error without a message"))
    except (Exception, Hang) as error:  # noqa: BLE001 - what it finds is anything
        found.add(number, error)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` in this thread after so many seconds."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def folder_of_cases() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tqppo-fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
