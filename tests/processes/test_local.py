"""Objects of this process."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

import pytest

from tqppo.processes.hosting import Hosting
from tqppo.processes.local import LocalLauncher
from tqppo.run.signals import Aborted


class Where:
    def thread(self) -> str:
        return threading.current_thread().name

    async def loop_thread(self) -> str:
        return threading.current_thread().name

    def abort(self) -> None:
        raise Aborted


class Counted(AbstractContextManager[None]):
    """Counts how often it is entered and left."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> None:
        self.seen.append("in")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seen.append("out")


def test_plain_methods_run_in_the_callers_thread_and_coroutines_on_one_loop() -> None:
    launcher = LocalLauncher()
    one, other = launcher.launch(Hosting(), Where), launcher.launch(Hosting(), Where)
    assert one.call(Where.thread).result() == threading.current_thread().name
    assert one.call(Where.loop_thread).result() == other.call(Where.loop_thread).result() == "tqppo-loop"
    launcher.close()
    assert "tqppo-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_signal_during_a_plain_method_reaches_the_caller_at_once() -> None:
    launcher = LocalLauncher()
    with pytest.raises(Aborted):
        launcher.launch(Hosting(), Where).call(Where.abort)
    launcher.close()


def test_every_object_has_an_isolation_that_is_entered_for_each_plain_call() -> None:
    made: list[Counted] = []

    def isolate() -> Counted:
        made.append(Counted())
        return made[-1]

    launcher = LocalLauncher(isolate)
    one, _ = launcher.launch(Hosting(), Where), launcher.launch(Hosting(), Where)
    one.call(Where.thread).result()
    one.call(Where.loop_thread).result()
    assert [each.seen for each in made] == [["in", "out"] * 2, ["in", "out"]]
    launcher.close()
