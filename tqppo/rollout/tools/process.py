"""The process that runs tools: `python -m tqppo.rollout.tools.process`, started by `processes.pool`.

Each call runs in a child of its own, so that a tool may crash, hang, allocate or print what it likes. When the call has
its result or its deadline is over, everything that it started is killed: this process adopts orphans, so that a child
in another session is found as well. What a tool prints is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO

from tqppo import plugins
from tqppo.errors import ConfigError
from tqppo.processes.lifeline import adopt_orphans, die_with_parent, end_children, supervise
from tqppo.rewards.process import describe, send
from tqppo.rollout.tools.schema import function_schema

EXIT_S = 0.05  # a child that is not gone this long after its answer is killed
Function = Callable[..., object]


class OwnerGone(Exception):
    """The owner closed the pipe, or is dead."""


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float
    max_chars: int
    memory_bytes: int  # of address space; 0: no limit


def load_tools(paths: Sequence[str]) -> tuple[dict[str, Function], list[dict[str, object]]]:
    """The functions by name, and their schemas."""
    functions: dict[str, Function] = {}
    schemas: list[dict[str, object]] = []
    for path in paths:
        place, _, name = path.rpartition(":")
        try:
            found = plugins.import_own(path) if place else None
        except (ImportError, OSError, SyntaxError) as error:
            raise ConfigError(f"tool {path!r} cannot be imported: {error}") from error
        if not callable(found):
            raise ConfigError(f"tool {path!r} is not a function; write module:function or file.py:function")
        if name in functions:
            raise ConfigError(f"tool {path!r}: there are two tools called {name!r}")
        schemas.append(function_schema(found, path))
        functions[name] = found
    return functions, schemas


def as_text(value: object, max_chars: int) -> str:
    """A tool's result as text that any tokenizer takes, cut in the middle."""
    if isinstance(value, bytes | bytearray):
        text = bytes(value[: 8 * max_chars]).decode("utf-8", "replace")
    elif isinstance(value, str):
        text = str(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return shorten(text, max_chars).encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, max_chars: int) -> str:
    """The beginning and the end of a text, and how much was left out between them."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    return f"{text[:head]}\n… {len(text) - max_chars} characters left out …\n{text[len(text) - tail :]}"


class ToolHost:
    """Runs calls one after the other, each in a child process."""

    def __init__(
        self, functions: Mapping[str, Function], limits: Limits, calls: BufferedReader, hidden: Sequence[int] = ()
    ) -> None:
        self._functions, self._limits, self._calls = functions, limits, calls
        self._pid = os.getpid()
        self._hidden = (0, 1, 2, calls.fileno(), *hidden)  # descriptors that a tool must not reach

    def call(self, name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """A call's `value`, `error` or `timeout`. Nothing that it started is left when this returns."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            self._run(name, arguments, writer)  # does not return
        os.close(writer)
        try:
            with os.fdopen(reader, "rb", buffering=0) as result:
                return self._wait(child, result)
        finally:
            await_exit(child)
            end_children()

    def _wait(self, child: int, result: BinaryIO) -> dict[str, object]:
        """Read the child's answer until it is whole, the child is dead, or the deadline is over."""
        deadline = time.monotonic() + self._limits.timeout_s
        most = 16 * self._limits.max_chars + 65_536
        read, ended, owner = b"", os.pidfd_open(child), self._calls.fileno()
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready, _, _ = select.select([result.fileno(), ended, owner], [], [], left)
                if owner in ready and not self._calls.peek(1):
                    raise OwnerGone
                if result.fileno() in ready:
                    read += (more := result.read(65_536))
                    if read.endswith(b"\n") or len(read) > most or not more:
                        return _answer(read, child)
                elif ended in ready:
                    return _answer(read, child)
        finally:
            os.close(ended)
        return {"timeout": True}

    def _run(self, name: str, arguments: Mapping[str, object], writer: int) -> None:
        """The child: call the function, write its result, and end without the clean-up of the parent."""
        try:
            die_with_parent(self._pid)
            self._confine()
            value: object = self._functions[name](**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = {"value": as_text(value, self._limits.max_chars)}
        except BaseException as error:  # noqa: BLE001 - a tool can raise anything, SystemExit too
            answer = {"error": _described(error, self._limits.max_chars)}
        with contextlib.suppress(OSError):
            os.write(writer, json.dumps(answer).encode() + b"\n")
        os._exit(0)

    def _confine(self) -> None:
        """Take away the protocol's pipes, what is printed, and memory beyond the limit."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._hidden:
            os.dup2(nothing, descriptor)
        if self._limits.memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (self._limits.memory_bytes, self._limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def await_exit(child: int) -> None:
    """Give a child that has answered a moment to end, because a look at all processes costs more than a call."""
    with contextlib.suppress(OSError):  # the child has been reaped
        ended = os.pidfd_open(child)
        try:
            select.select([ended], [], [], EXIT_S)
        finally:
            os.close(ended)


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]


def _described(error: BaseException, max_chars: int) -> str:
    try:
        return as_text(f"{type(error).__name__}: {error}", max_chars)
    except Exception:  # noqa: BLE001 - the error's own __str__ is the tool's, too
        return f"{type(error).__name__} without a readable message"


def _answer(read: bytes, child: int) -> dict[str, object]:
    """The answer that the child wrote; an error if it wrote none, or something else."""
    try:
        answer = json.loads(read)
        known: dict[str, object] = {key: str(answer[key]) for key in ("value", "error") if key in answer}
        if known:
            return known
    except (ValueError, TypeError, RecursionError):
        pass
    if read:
        return {"error": "its answer cannot be read"}
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"error": f"the tool's process ended ({how})"}
    return {"error": "the tool's process ended"}


def main() -> None:
    calls, pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a module prints when it is imported goes to the log instead of into the protocol
    start = json.loads(calls.readline())
    supervise(start["parent"])
    adopt_orphans()
    try:
        functions, schemas = load_tools(start["tools"])
    except Exception as error:  # noqa: BLE001 - importing a user's file can raise anything
        send(pipe, {"refused": describe(error)})
        return
    send(pipe, {"ready": True, "schemas": schemas})
    limits = Limits(start["timeout_s"], start["max_chars"], start["memory_bytes"])
    host = ToolHost(functions, limits, calls, [pipe.fileno()])
    try:
        while line := calls.readline():
            call = json.loads(line)
            send(pipe, {"id": call["id"], **host.call(call["tool"], call["arguments"])})
    except (OwnerGone, BrokenPipeError):
        sys.exit(0)


if __name__ == "__main__":
    main()
