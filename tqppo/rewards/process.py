"""The process that runs a reward function: `python -m tqppo.rewards.process`, started by `processes.pool`.

It reads and writes one JSON object per line. The first line that it reads names the function and its arguments, the
others are samples with an id. It writes one answer per id, in any order. A sync function runs in the main thread, one
sample after the other; an async one runs many samples at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import BinaryIO, cast

from tqppo import plugins
from tqppo.errors import DataError, TqppoError
from tqppo.processes.lifeline import adopt_orphans, die_with_parent
from tqppo.rewards.functions import BUILT_IN

RewardFunction = Callable[..., object]


def load_function(name: str) -> RewardFunction:
    """Import a reward function: a built-in name, `module:function` or `file.py:function`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    place, _, attribute = name.rpartition(":")
    if not place:
        known = ", ".join(BUILT_IN)
        raise DataError(f"reward function {name!r}: no built-in has this name ({known}); write module:function")
    try:
        function = plugins.import_own(name)
    except (ImportError, OSError, SyntaxError) as error:
        raise DataError(f"reward function {name!r}: cannot import {place}: {error}") from error
    if not callable(function):
        raise DataError(f"reward function {name!r}: {place} has no function {attribute!r}")
    return function


def check_signature(name: str, function: RewardFunction, arguments: Mapping[str, object]) -> None:
    """Raise now what would fail at the first sample."""
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info=None, **dict(arguments)
        )
    except TypeError as error:
        raise DataError(
            f"reward function {name!r} cannot be called as "
            f"f(data_source, solution_str, ground_truth, extra_info, **reward.function_args): {error}"
        ) from None


class SampleLoop:
    """Reads samples, calls the function, writes answers."""

    def __init__(self, function: RewardFunction, arguments: Mapping[str, object], pipe: BinaryIO) -> None:
        self._function, self._arguments, self._pipe = function, arguments, pipe

    def run(self, samples: BinaryIO) -> None:
        for line in samples:
            sample = json.loads(line)
            with self._answering(sample["id"]) as answer:
                answer["value"] = self._call(sample)

    async def run_async(self, samples: BinaryIO, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        while line := await loop.run_in_executor(None, samples.readline):
            task = loop.create_task(self._one(json.loads(line), timeout_s))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _one(self, sample: Mapping[str, object], timeout_s: float) -> None:
        with self._answering(sample["id"]) as answer:
            try:
                answer["value"] = await asyncio.wait_for(cast(Awaitable[object], self._call(sample)), timeout_s)
            except asyncio.TimeoutError:
                answer["timeout"] = True

    def _call(self, sample: Mapping[str, object]) -> object:
        return self._function(
            data_source=sample["source"],
            solution_str=sample["solution"],
            ground_truth=sample["answer"],
            extra_info=sample["extra"],
            **self._arguments,
        )

    @contextlib.contextmanager
    def _answering(self, sample_id: object) -> Iterator[dict[str, object]]:
        """Yield the answer to fill in, then send it; an error inside becomes the answer."""
        answer: dict[str, object] = {"id": sample_id}
        try:
            yield answer
        except Exception as error:  # noqa: BLE001 - a user's function can raise anything; the parent gets it as text
            answer["error"] = describe(error)
        send(self._pipe, answer)


def describe(error: BaseException) -> str:
    """The error and the line of the user's code that raised it."""
    if isinstance(error, TqppoError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def send(pipe: BinaryIO, message: Mapping[str, object]) -> None:
    try:
        line = json.dumps(message, default=_plain)
    except TypeError as error:
        line = json.dumps({"id": message.get("id"), "error": f"the result is not a number or a dict of them: {error}"})
    pipe.write(line.encode() + b"\n")
    pipe.flush()


def _plain(value: object) -> object:
    """A scalar of NumPy or torch as a Python number."""
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is not None:
        return item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def main() -> None:
    samples, pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # prints of the function go to the log instead of into the protocol
    start = json.loads(samples.readline())
    die_with_parent(start["parent"])  # even while the function is stuck in C code
    adopt_orphans()
    try:
        function = load_function(start["function"])
        check_signature(start["function"], function, start["arguments"])
    except Exception as error:  # noqa: BLE001 - importing a user's file can raise anything
        send(pipe, {"refused": describe(error)})
        return
    is_async = inspect.iscoroutinefunction(function)
    send(pipe, {"ready": True, "is_async": is_async})
    loop = SampleLoop(function, start["arguments"], pipe)
    if is_async:
        asyncio.run(loop.run_async(samples, start["timeout_s"]))
    else:
        loop.run(samples)


if __name__ == "__main__":
    main()
