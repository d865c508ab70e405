"""Objects in the caller's own process, for a run without Ray.

Plain methods run at once, in the caller's thread: a breakpoint in one stops the step, and Ctrl-C reaches it.
Coroutines, such as agent loops and their engine, run on one event loop in a thread of its own. What a process would
have for itself, such as torch's number of threads, is put in place around each plain call by an `Isolation`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

from tqppo.processes.hosting import Call, HostDied, Hosting, Process, Watch

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
Isolation = AbstractContextManager[object]  # entered around every call, so it must be reusable


class LocalProcess(Process[A], Generic[A]):
    """An object of this process. Its plain methods are called in turn, its coroutines run side by side."""

    def __init__(self, held: A, loop: asyncio.AbstractEventLoop, isolation: Isolation) -> None:
        self._held: A | None = held
        self._name = repr(held)
        self._loop, self._isolation = loop, isolation
        self._under_way: set[Future[Any]] = set()

    def _start(self, method: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> Call[Any]:
        if self._held is None:
            return _failed(HostDied(f"{self._name} was ended before"))
        given = [each.result() if isinstance(each, Call) else each for each in (self._held, *args)]
        if not inspect.iscoroutinefunction(method):
            return _called(self._isolation, method, given, named)
        future = asyncio.run_coroutine_threadsafe(method(*given, **named), self._loop)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return Call(future, future.cancel)

    def kill(self) -> None:
        self._held = None
        for future in list(self._under_way):
            future.cancel()


class NothingToWatch:
    """Objects of the caller's own process cannot stand still while it looks."""

    def still(self) -> Sequence[str]:
        return ()


class LocalLauncher:
    """Makes objects in this process. `isolate` makes the isolation of each; closing ends the event loop."""

    def __init__(self, isolate: Callable[[], Isolation] = nullcontext) -> None:
        self._isolate = isolate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tqppo-loop", daemon=True)
        self._thread.start()

    def launch(self, how: Hosting, kind: Callable[P, A], /, *args: P.args, **named: P.kwargs) -> Process[A]:
        isolation = self._isolate()
        with isolation:
            held = kind(*args, **named)
        return LocalProcess(held, self._loop, isolation)

    def watch(self, processes: Mapping[str, Process[Any]]) -> Watch:
        return NothingToWatch()

    def close(self) -> None:
        """End the event loop. A loop that computes for longer than a few seconds is left to end with this process."""
        self._loop.call_soon_threadsafe(self._loop.create_task, _end(self._loop))
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


def _called(
    isolation: Isolation, function: Callable[..., Any], args: Sequence[object], named: Mapping[str, object]
) -> Call[Any]:
    """Call a function now. Its error is the call's; a signal's is raised here."""
    future: Future[Any] = Future()
    try:
        with isolation:
            future.set_result(function(*args, **named))
    except Exception as error:  # noqa: BLE001 (the caller has it from the call)
        future.set_exception(error)
    return Call(future, future.cancel)


def _failed(error: Exception) -> Call[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return Call(future, future.cancel)


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
    loop.stop()
