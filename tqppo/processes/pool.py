"""The parent's side of processes that run a user's functions: the reward, or the tools of an agent.

Every call returns within a deadline: a process that misses it is killed with its children and replaced. The process
reads and writes one JSON object per line. The first line that it reads is `ProcessSpec.start`, which it answers with
`ready` or with `refused` and a reason. The others are samples with an id, each answered with a `value`, an `error` or
`timeout`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import count

from tqppo.errors import DataError
from tqppo.processes import lifeline

log = logging.getLogger(__name__)

JsonMessage = dict[str, object]  # one JSON object of the protocol
START_TIMEOUT_S = 120.0  # importing a user's module may mean importing torch
CONCURRENT_ASYNC = 32  # samples that one process works on at once when the function is async
GRACE_S = 2.0  # an async function's process ends late samples itself; after this much longer it is stuck
END_S = 5.0  # a process's supervisor ends everything below it; after this long it is killed itself


class SampleFailed(Exception):
    """The function raised or took too long, or its process died."""


class ProcessDied(Exception):
    """The process ended before it answered."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process runs; plain values."""

    module: str  # started as `python -m module`
    what: str  # the process's work in messages, such as `reward function 'exact_match'`
    start: Mapping[str, object]
    timeout_s: float
    grace_s: float = 0.0  # how much longer to wait for a process that ends late samples itself

    def start_line(self) -> bytes:
        return json.dumps({**self.start, "timeout_s": self.timeout_s, "parent": os.getpid()}).encode() + b"\n"


class FunctionProcess:
    """One process. `submit` sends it a sample; a thread reads the answers."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", spec.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C at the terminal does not reach it
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._timeout_s = spec.timeout_s
        self._pending: dict[object, Future[JsonMessage]] = {"start": Future()}
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._ids = count()
        started = self._pending["start"]
        self._reader = threading.Thread(target=self._read, daemon=True, name="process-answers")
        self._reader.start()
        try:
            self._write(spec.start_line(), START_TIMEOUT_S)
            answer = started.result(START_TIMEOUT_S)
        except (FutureTimeout, ProcessDied) as error:
            self.kill()
            why = "died" if isinstance(error, ProcessDied) else f"was not ready after {START_TIMEOUT_S:.0f} s"
            raise DataError(f"{spec.what}: its process {why} while importing it") from None
        if "refused" in answer:
            self.kill()
            raise DataError(str(answer["refused"]))
        self.ready = answer
        self.is_async = bool(answer.get("is_async"))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, sample: Mapping[str, object]) -> Future[JsonMessage]:
        """Send a sample. Raises FutureTimeout if the process does not read it within a sample's deadline."""
        future: Future[JsonMessage] = Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
        self._write(json.dumps({"id": number, **sample}).encode() + b"\n", self._timeout_s)
        return future

    def kill(self) -> None:
        """End the process and everything that it started, in whatever process group and session."""
        lifeline.end([self._process.pid], grace_s=END_S)
        try:
            self._process.wait(lifeline.KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d does not end; it is left behind in the kernel", self._process.pid)
            return
        self._reader.join(lifeline.KILL_TIMEOUT_S)
        if self._reader.is_alive():  # it reads from a pipe that a process which escaped still holds
            log.warning("a process that process %d started has outlived it", self._process.pid)
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _write(self, line: bytes, timeout_s: float) -> None:
        """Write a whole line. When the process is dead, the reader fails every pending sample."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        if not self._writing.acquire(timeout=timeout_s):
            raise FutureTimeout
        try:
            descriptor, left, room = self._process.stdin.fileno(), memoryview(line), select.poll()
            room.register(descriptor, select.POLLOUT)
            while left:
                if not room.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise FutureTimeout
                left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]
        except (BrokenPipeError, ValueError):  # ValueError: the pipe is closed
            pass
        finally:
            self._writing.release()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._pending.pop(answer.get("id", "start"), None)
            if future is not None:
                future.set_result(answer)
        code = self._process.wait()  # the end of the pipe is the end of the process and of its supervisor
        with self._lock:
            pending, self._pending = list(self._pending.values()), _Closed()
        for future in pending:
            future.set_exception(ProcessDied(f"its process died ({_ending(code)})"))


class _Closed(dict[object, "Future[JsonMessage]"]):
    """The pending samples of a dead process: a sample that is added fails at once."""

    def __setitem__(self, key: object, future: Future[JsonMessage]) -> None:
        future.set_exception(ProcessDied("its process has ended"))


class ProcessPool:
    """A fixed number of processes. `call` is for threads: it blocks until its sample has a value or has failed."""

    def __init__(self, spec: ProcessSpec, num_processes: int) -> None:
        self._spec = spec
        # A process dies with the thread that started it (see lifeline.die_with_parent), so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="process-starter")
        self._processes: list[FunctionProcess] = []
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._one_alone = threading.Lock()
        self._closed = False
        self._replaced: list[str] = []
        try:
            for _ in range(num_processes):
                self._processes.append(self._start())
        except BaseException:
            self.close()
            raise
        self.ready = self._processes[0].ready
        self._is_shared = self._processes[0].is_async
        self.num_slots = num_processes * (CONCURRENT_ASYNC if self._is_shared else 1)
        for slot in range(self.num_slots):
            self._slots.put(slot % num_processes)

    def call(self, sample: Mapping[str, object]) -> object:
        """Return the function's value for a sample, or raise SampleFailed."""
        place = self._slots.get()
        try:
            process = self._process(place)
            try:
                patience_s = self._spec.timeout_s + max(self._spec.grace_s, GRACE_S if self._is_shared else 0.0)
                return _value(process.submit(sample).result(patience_s), self._spec.timeout_s)
            except (FutureTimeout, ProcessDied) as error:
                process.kill()
                self._replaced.append(_reason(error, self._spec.timeout_s))
                if self._is_shared:
                    return self._alone(sample)
                raise SampleFailed(_reason(error, self._spec.timeout_s)) from None
        finally:
            self._slots.put(place)

    def take_replaced(self) -> list[str]:
        """Why processes were replaced since the last call."""
        taken, self._replaced = self._replaced, []
        return taken

    def close(self) -> None:
        """Kill every process. May be called twice, and while samples are being scored."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        self._starter.shutdown()

    def _start(self) -> FunctionProcess:
        try:
            return self._starter.submit(FunctionProcess, self._spec).result()
        except RuntimeError:  # the starter is shut down
            raise SampleFailed("its processes were closed") from None

    def _process(self, place: int) -> FunctionProcess:
        """The process at this place; a new one if the last was killed."""
        with self._lock:
            if self._closed:
                raise SampleFailed("its processes were closed")
            if not self._processes[place].is_alive:
                self._processes[place].kill()
                self._processes[place] = self._start()
            return self._processes[place]

    def _alone(self, sample: Mapping[str, object]) -> object:
        """Score a sample again in its own process, after the process that it shared with others was killed.

        This shows which of those samples made the process hang or die.
        """
        with self._one_alone:
            process = self._start()
            try:
                return _value(process.submit(sample).result(self._spec.timeout_s), self._spec.timeout_s)
            except (FutureTimeout, ProcessDied) as error:
                raise SampleFailed(_reason(error, self._spec.timeout_s)) from None
            finally:
                process.kill()


def _value(answer: JsonMessage, timeout_s: float) -> object:
    if "error" in answer:
        raise SampleFailed(str(answer["error"]))
    if "timeout" in answer:
        raise SampleFailed(f"took longer than {timeout_s:g} s")
    return answer["value"]


def _reason(error: Exception, timeout_s: float) -> str:
    return str(error) if isinstance(error, ProcessDied) else f"took longer than {timeout_s:g} s"


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
