"""The process that runs a reward function: `python -m tqppo.rewards.process`, started by `processes.pool`.

It reads and writes one JSON object per line. The first line that it reads names the function and its arguments, the
others are samples with an id. It writes one answer per id, in any order. A sync function runs in the main thread, one
sample after the other; an async one runs many samples at once, and a batch function gets all samples that wait.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import json
import os
import select
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tqppo import plugins
from tqppo.errors import DataError, TqppoError
from tqppo.processes.lifeline import adopt_orphans, supervise
from tqppo.rewards.calls import RewardCall, RewardFunction
from tqppo.rewards.functions import BUILT_IN

MOST_AT_ONCE = 32  # samples that a batch function gets in one call


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
        raise DataError(f"reward function {name!r}: {place} has no function {attribute!r}{_others(place, attribute)}")
    return function


def _others(place: str, attribute: str) -> str:
    """The functions that a file does have, nearest first."""
    if not place.endswith(".py"):
        return ""
    nodes = ast.parse(Path(place).read_bytes()).body
    names = [each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    close = difflib.get_close_matches(attribute, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}" if names else ""


class SampleLoop:
    """Reads samples, calls the function, writes answers."""

    def __init__(self, call: RewardCall, pipe: BinaryIO) -> None:
        self._call, self._pipe = call, pipe

    def run(self, samples: BinaryIO) -> None:
        for line in samples:
            sample = json.loads(line)
            with self._answering(sample["id"]) as answer:
                answer["value"] = self._call.one(sample)

    def run_batches(self, samples: BinaryIO, is_waiting: Callable[[], bool]) -> None:
        """Give the function all samples that wait. If it fails, each is tried on its own: one may be the cause."""
        while line := samples.readline():
            batch = [json.loads(line)]
            while len(batch) < MOST_AT_ONCE and is_waiting() and (line := samples.readline()):
                batch.append(json.loads(line))
            if len(batch) > 1 and (values := self._together(batch)) is not None:
                for sample, value in zip(batch, values, strict=True):
                    send(self._pipe, {"id": sample["id"], "value": value})
                continue
            for sample in batch:
                with self._answering(sample["id"]) as answer:
                    answer["value"] = self._call.one(sample)

    def _together(self, batch: list[dict[str, object]]) -> list[object] | None:
        try:
            return self._call.many(batch)
        except Exception:  # noqa: BLE001 - a user's function can raise anything; each sample is tried on its own
            return None

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
                answer["value"] = await asyncio.wait_for(self._call.one_async(sample), timeout_s)
            except asyncio.TimeoutError:
                answer["timeout"] = True

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
    supervise(start["parent"])
    adopt_orphans()  # so that a function of ours finds what the programs that it ran have left
    try:
        call = RewardCall(start["function"], load_function(start["function"]), start["arguments"])
    except Exception as error:  # noqa: BLE001 - importing a user's file can raise anything
        send(pipe, {"refused": describe(error)})
        return
    together = call.is_async or call.is_batch
    send(pipe, {"ready": True, "is_async": together, "wants_transcript": call.wants_transcript})
    loop = SampleLoop(call, pipe)
    if call.is_async:
        asyncio.run(loop.run_async(samples, start["timeout_s"]))
    elif call.is_batch:
        loop.run_batches(samples, lambda: bool(select.select([samples], [], [], 0)[0]))
    else:
        loop.run(samples)


if __name__ == "__main__":
    main()
