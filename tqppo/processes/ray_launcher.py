"""Processes as Ray actors: how a run's launcher starts, calls, watches and ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

import ray
from ray.actor import ActorProxy
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from tqppo.errors import TqppoError
from tqppo.processes.actor_watch import ActorWatch
from tqppo.processes.hosting import Call, HostDied, Hosting, Process, Watch
from tqppo.processes.ray_calls import ACTOR_GONE, call, kill

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class RayCall(Call[T]):
    """A Ray object that another process makes."""

    def __init__(self, ref: ray.ObjectRef[T]) -> None:
        self.ref = ref
        super().__init__(_future(ref), self._cancel)

    def _cancel(self) -> None:
        with suppress(RayError, ValueError):
            ray.cancel(self.ref)


def _future(ref: ray.ObjectRef[T]) -> Future[T]:
    """The object as a future that fails with the errors that `Call` promises."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # a caller that gives up its wait does not cancel the call

    def finish(made: Future[T]) -> None:
        error = made.exception()
        if error is None:
            answer.set_result(made.result())
        else:
            answer.set_exception(_cause(error))

    ref.future().add_done_callback(finish)
    return answer


def _cause(error: BaseException) -> BaseException:
    if isinstance(error, RayTaskError) and isinstance(error.cause, TqppoError):
        return error.cause
    if isinstance(error, ACTOR_GONE):
        return HostDied(str(error), may_return=isinstance(error, ActorUnavailableError))
    return error


class RayProcess(Process[A], Generic[A]):
    """A Ray actor. It can be sent to other processes, which may call it as well."""

    def __init__(self, actor: ActorProxy[A]) -> None:
        self.actor = actor

    def _start(self, method: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> Call[Any]:
        given = [each.ref if isinstance(each, RayCall) else each for each in args]  # Ray passes the value on
        return RayCall(call(self.actor, method, *given, **named))

    def kill(self) -> None:
        kill(self.actor)


class RayLauncher:
    """Starts each object as a Ray actor."""

    def launch(self, how: Hosting, kind: Callable[P, A], /, *args: P.args, **named: P.kwargs) -> Process[A]:
        assert isinstance(kind, type), "an actor is an object of a class"
        options = {"max_concurrency": how.concurrency, "max_restarts": how.restarts, "max_task_retries": 0}
        make: Any = ray.remote(kind).options(**how.seat.options(), **options)
        return RayProcess(make.remote(*args, **named))

    def watch(self, processes: Mapping[str, Process[Any]]) -> Watch:
        return ActorWatch({name: each.actor for name, each in processes.items() if isinstance(each, RayProcess)})
