"""Processes that run a reward function, seen from the side that starts, feeds and kills them. `rewards` owns a pool.

Every call returns within a deadline: a process that is late is killed, with whatever it started, and replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqppo.errors import DataError

START_TIMEOUT_S = 120.0  # importing a user's module may mean importing torch
CONCURRENT_ASYNC = 32  # samples that one process works on at once when the function is async
GRACE_S = 2.0  # an async function's process ends late samples itself; past this it is stuck


class SampleFailed(Exception):
    """The function raised, took too long, or its process died."""


class WorkerDied(Exception):
    """The process ended with this sample in it."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """What a process runs; plain values."""

    function: str
    arguments: Mapping[str, Any]
    timeout_s: float

    def start_line(self) -> bytes:
        start = {"function": self.function, "arguments": dict(self.arguments), "timeout_s": self.timeout_s}
        return json.dumps({**start, "parent": os.getpid()}).encode() + b"\n"


class Worker:
    """One process. Samples go in by `submit`; a thread reads the answers."""

    def __init__(self, spec: FunctionSpec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tqppo.rewards.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that it can be killed together with its children, and Ctrl-C is ours alone
        )
        self._pending: dict[Any, Future[dict[str, Any]]] = {"start": Future()}
        self._lock = threading.Lock()
        self._ids = count()
        started = self._pending["start"]
        self._reader = threading.Thread(target=self._read, daemon=True, name="reward-answers")
        self._reader.start()
        self._write(spec.start_line())
        try:
            answer = started.result(START_TIMEOUT_S)
        except (FutureTimeout, WorkerDied) as error:
            self.kill()
            why = "died" if isinstance(error, WorkerDied) else f"was not ready after {START_TIMEOUT_S:.0f} s"
            raise DataError(f"reward function {spec.function!r}: its process {why} while importing it") from None
        if "refused" in answer:
            self.kill()
            raise DataError(answer["refused"])
        self.is_async: bool = answer["is_async"]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, sample: Mapping[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
        self._write(json.dumps({"id": number, **sample}).encode() + b"\n")
        return future

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # A dead process is noticed by the reader, which fails everything that is pending.
        with contextlib.suppress(BrokenPipeError, ValueError), self._lock:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._pending.pop(answer.get("id", "start"), None)
            if future is not None:
                future.set_result(answer)
        self._process.wait()
        with self._lock:
            pending, self._pending = list(self._pending.values()), _Closed()
        for future in pending:
            future.set_exception(WorkerDied(f"its process died ({_ending(self._process.returncode)})"))


class _Closed(dict[Any, "Future[dict[str, Any]]"]):
    """Pending samples of a process that is gone: each fails at once."""

    def __setitem__(self, key: Any, future: Future[dict[str, Any]]) -> None:
        future.set_exception(WorkerDied("its process is gone"))


class Pool:
    """A fixed number of processes. `call` is for threads: it blocks until its sample has a value or has failed."""

    def __init__(self, spec: FunctionSpec, num_workers: int) -> None:
        self._spec = spec
        # A process dies with the thread that started it (see lifeline.die_with_parent), so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-starter")
        self._workers: list[Worker] = []
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._one_alone = threading.Lock()
        self._closed = False
        try:
            for _ in range(num_workers):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise
        self._shared = self._workers[0].is_async
        self.num_slots = num_workers * (CONCURRENT_ASYNC if self._shared else 1)
        for slot in range(self.num_slots):
            self._slots.put(slot % num_workers)

    def call(self, sample: Mapping[str, Any]) -> Any:
        """The function's value for a sample, or SampleFailed."""
        place = self._slots.get()
        try:
            worker = self._worker(place)
            try:
                patience = self._spec.timeout_s + (GRACE_S if self._shared else 0.0)
                return _value(worker.submit(sample).result(patience), self._spec.timeout_s)
            except (FutureTimeout, WorkerDied) as error:
                worker.kill()
                if self._shared:
                    return self._alone(sample)
                raise SampleFailed(_reason(error, self._spec.timeout_s)) from None
        finally:
            self._slots.put(place)

    def close(self) -> None:
        """Kills every process; safe to call twice, and while samples are being scored."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        self._starter.shutdown()

    def pids(self) -> list[int]:
        return [worker._process.pid for worker in self._workers]

    def _start(self) -> Worker:
        try:
            return self._starter.submit(Worker, self._spec).result()
        except RuntimeError:  # the starter is shut down
            raise SampleFailed("the scorer is closed") from None

    def _worker(self, place: int) -> Worker:
        """The process of a slot, a new one if the last was killed."""
        with self._lock:
            if self._closed:
                raise SampleFailed("the scorer is closed")
            if not self._workers[place].is_alive:
                self._workers[place].kill()
                self._workers[place] = self._start()
            return self._workers[place]

    def _alone(self, sample: Mapping[str, Any]) -> Any:
        """Samples that shared a stuck or dead process are scored again, each in a process of its own.

        Only so is it known which of them was to blame.
        """
        with self._one_alone:
            worker = self._start()
            try:
                return _value(worker.submit(sample).result(self._spec.timeout_s), self._spec.timeout_s)
            except (FutureTimeout, WorkerDied) as error:
                raise SampleFailed(_reason(error, self._spec.timeout_s)) from None
            finally:
                worker.kill()


def _value(answer: Mapping[str, Any], timeout_s: float) -> Any:
    if "error" in answer:
        raise SampleFailed(answer["error"])
    if "timeout" in answer:
        raise SampleFailed(f"took longer than {timeout_s:g} s")
    return answer["value"]


def _reason(error: Exception, timeout_s: float) -> str:
    return str(error) if isinstance(error, WorkerDied) else f"took longer than {timeout_s:g} s"


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
