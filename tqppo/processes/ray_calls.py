"""Objects in Ray actors, and typed calls to Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from tqppo.errors import TqppoError
from tqppo.processes.hosting import Call, HostDied, Hosting, Process

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


@overload
def call(
    actor: ActorProxy[A],
    method: Callable[Concatenate[A, P], Coroutine[object, object, T]],
    /,
    *args: P.args,
    **named: P.kwargs,
) -> ray.ObjectRef[T]: ...


@overload
def call(
    actor: ActorProxy[A], method: Callable[Concatenate[A, P], T], /, *args: P.args, **named: P.kwargs
) -> ray.ObjectRef[T]: ...


def call(
    actor: ActorProxy[A], method: Callable[Concatenate[A, P], object], /, *args: P.args, **named: P.kwargs
) -> object:
    """Start `method`, a function of the actor's class, on the actor: `call(worker, RolloutWorker.close)`.

    A type checker sees the method, its arguments and its result, which `actor.close.remote()` hides.
    """
    return getattr(actor, method.__name__).remote(*args, **named)


def kill(actor: ActorProxy[A]) -> None:
    """End the actor's process at once. Does nothing if it has ended."""
    ray.kill(cast(ActorHandle[A], actor))


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
    if isinstance(error, RayActorError):
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

    def run(self, how: Hosting, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Call[T]:
        make: Any = ray.remote(function)  # Ray types functions by their number of arguments
        return RayCall(make.options(**how.seat.options(), max_retries=how.restarts).remote(*args, **named))


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def num_nodes() -> int:
    """Live nodes of the cluster."""
    nodes: Callable[[], list[dict[str, bool]]] = ray.nodes
    return sum(node["Alive"] for node in nodes())


def own_address() -> str:
    """The address of this node for others of the cluster."""
    address: Callable[[], str] = ray.util.get_node_ip_address
    return address()
