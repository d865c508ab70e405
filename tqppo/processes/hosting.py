"""Objects that live in processes and are called by method: what worker groups, engine pools and `run` see of them.

A `Launcher` makes an object in a process and returns a `Process`. `ray_launcher.RayLauncher` starts Ray actors,
`local.LocalLauncher` keeps every object in the caller's own process. Nothing above this room knows which it is.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, overload

from tqppo.devices.seats import Seat
from tqppo.errors import DeadlineExceeded, TqppoError, WorkerError
from tqppo.processes import ray_health
from tqppo.processes.host_memory import out_of_memory
from tqppo.processes.stillness import LOOK_S

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


class HostDied(Exception):
    """The process of a call is gone. `may_return`: it is being restarted, or cannot be reached at the moment."""

    def __init__(self, message: str, *, may_return: bool = False) -> None:
        super().__init__(message)
        self.may_return = may_return


class Call(Generic[T]):
    """A call under way. It can be blocked on, awaited, and passed as an argument of another call.

    It raises a `TqppoError` as the method raised it, `HostDied`, or any other error of the method.
    """

    def __init__(self, future: Future[T], give_up: Callable[[], object]) -> None:
        self.future = future
        self._give_up = give_up

    def result(self) -> T:
        """Block until the call has ended."""
        return self.future.result()

    def cancel(self) -> None:
        """Ask the process to end the call early; does nothing if it has ended."""
        self._give_up()

    def __await__(self) -> Generator[Any, Any, T]:
        return asyncio.wrap_future(self.future).__await__()


class Process(ABC, Generic[A_co]):
    """A process that holds an object of class `A`: `process.call(RolloutWorker.close)`."""

    @overload
    def call(
        self,
        method: Callable[Concatenate[A_co, P], Coroutine[object, object, T]],
        /,
        *args: P.args,
        **named: P.kwargs,
    ) -> Call[T]: ...

    @overload
    def call(self, method: Callable[Concatenate[A_co, P], T], /, *args: P.args, **named: P.kwargs) -> Call[T]: ...

    def call(self, method: Callable[..., object], /, *args: object, **named: object) -> Call[Any]:
        """Start `method`, a function of the object's class, on the object."""
        return self._start(method, args, named)

    @abstractmethod
    def _start(
        self, method: Callable[..., object], args: Sequence[object], named: Mapping[str, object]
    ) -> Call[Any]: ...

    @abstractmethod
    def kill(self) -> None:
        """End the process at once. Does nothing if it has ended."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """How a process is started: its seat, how many calls it takes at a time, and how often it may be restarted."""

    seat: Seat = field(default_factory=Seat)
    concurrency: int = 1
    restarts: int = 0


class Launcher(Protocol):
    """Starts processes."""

    def launch(self, how: Hosting, kind: Callable[P, A], /, *args: P.args, **named: P.kwargs) -> Process[A]:
        """Make an object of class `kind` in a process; returns before it exists, where that takes time."""

    def watch(self, processes: Mapping[str, Process[Any]]) -> Watch:
        """Look at these processes, by name, while their calls are waited for."""


class Watch(Protocol):
    """Looks at the processes of some calls."""

    def still(self) -> Sequence[str]:
        """Each process that stands still: its name, and what it does instead of running."""


def close_all(
    processes: Sequence[Process[A]], close: Callable[[A], object], timeout_s: float, *, watch: Watch | None = None
) -> None:
    """Call `close` on every object and wait until all have closed; then, or after `timeout_s`, end the processes.

    If one of them stands still, none is waited for any longer.
    """
    if ray_health.lost():
        return
    calls: list[Call[object]] = [process.call(close) for process in processes]
    settle(calls, timeout_s, grace_s=timeout_s, watch=watch)
    for process in processes:
        process.kill()


@dataclass(frozen=True, slots=True)
class Settled:
    """How a set of calls stands after a wait: positions of those that failed, and of those without a result.

    `still` says of processes that stand still what they do instead.
    """

    failures: dict[int, BaseException] = field(default_factory=dict)
    pending: tuple[int, ...] = ()
    still: Sequence[str] = ()


_failing: ContextVar[Future[NoReturn] | None] = ContextVar("failing", default=None)  # of this thread


@contextmanager
def failing_with(failure: Future[NoReturn]) -> Iterator[None]:
    """Have every wait of this thread for calls raise this error as soon as there is one."""
    token = _failing.set(failure)
    try:
        yield
    finally:
        _failing.reset(token)


def settle(
    calls: Sequence[Call[T]],
    timeout_s: float,
    *,
    grace_s: float = 0.0,
    watch: Watch | None = None,
    until_first: bool = False,
) -> Settled:
    """Wait until every call has a result, one has failed, `timeout_s` has passed, or a process stands still.

    With `until_first`, the first result is enough.
    After a failure the other calls get `grace_s` to fail too, so that the report can name every failed process.
    Raises ClusterLost if Ray itself is gone, and the error of `failing_with` if there is one.
    """
    elsewhere = _failing.get()
    others: set[Future[Any]] = set() if elsewhere is None else {elsewhere}
    places = {call.future: place for place, call in enumerate(calls)}
    pending, deadline = set(places), time.monotonic() + timeout_s
    failures: dict[int, BaseException] = {}
    still: Sequence[str] = ()
    while pending and not failures and not still:
        ray_health.check()
        left = deadline - time.monotonic()
        done, _ = futures.wait({*pending, *others}, max(0.0, min(left, LOOK_S)), futures.FIRST_COMPLETED)
        if elsewhere is not None and elsewhere in done:
            elsewhere.result()  # raises
        pending -= done
        if not done and left <= LOOK_S:
            break
        failures = _failures(done, places)
        if done and until_first:
            break
        still = watch.still() if watch is not None and not done else ()
    if failures:
        ray_health.check(now=True)  # then it is why they failed
    if failures and pending:
        late, pending = futures.wait(pending, grace_s)
        failures |= _failures(late, places)
    return Settled(failures, tuple(sorted(places[future] for future in pending)), still)


def first_ended(calls: Sequence[Call[T]], timeout_s: float) -> list[Call[T]]:
    """The calls that have ended, as soon as there is one; none after `timeout_s`."""
    done, _ = futures.wait([call.future for call in calls], timeout_s, futures.FIRST_COMPLETED)
    return [call for call in calls if call.future in done]


def results(
    calls: Sequence[Call[T]],
    timeout_s: float,
    what: str,
    *,
    missing: Callable[[], str] = str,
    died: type[TqppoError] = WorkerError,
    watch: Watch | None = None,
) -> list[T]:
    """Return the results in the order of `calls`, or raise the first failure as soon as it happens.

    Raises `DeadlineExceeded` after `timeout_s`, with `missing()` in its message; a call's own error as it was raised;
    and `died` if the process of a call is gone or stands still. `what` names the calls in these messages.
    """
    settled = settle(calls, timeout_s, watch=watch)
    for error in settled.failures.values():
        raise cause_of(error, what, died) from None
    if settled.still:
        raise died(f"{what}: {'; '.join(settled.still)}")
    if settled.pending:
        raise DeadlineExceeded(f"{what} did not finish within {timeout_s:g} s. {missing()}".rstrip())
    return [call.result() for call in calls]


def cause_of(error: BaseException, what: str, died: type[TqppoError] = WorkerError) -> BaseException:
    """Return the error to raise for a failed call: its own, or `died` if its process is gone."""
    if not isinstance(error, HostDied):
        return error
    return out_of_memory(error, what) or died(f"{what}: the process died. {error}")


def described(error: BaseException) -> str:
    """An error with its traceback. That of another process is part of the error's text."""
    return str(error) if error.__traceback__ is None else "".join(traceback.format_exception(error)).rstrip()


def _failures(done: set[Future[T]], places: Mapping[Future[T], int]) -> dict[int, BaseException]:
    found = {places[future]: _error(future) for future in done}
    return {place: error for place, error in sorted(found.items()) if error is not None}


def _error(future: Future[T]) -> BaseException | None:
    return HostDied("the call was cancelled") if future.cancelled() else future.exception()
