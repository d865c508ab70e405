"""The short way to an index on the same node: JSON over a local socket, at a fraction of the cost of an actor call.

The socket has no file, so nothing is left of it when its process ends. Who connects must know the run's token. A
connection that ends takes back what it asked for and did not get. What is not JSON goes through Ray.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import itertools
import json
import os
import socket
import struct
import sys
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tqppo import errors
from tqppo.errors import TqppoError
from tqppo.protocols import Locator, StorageSpec
from tqppo.queue.index.index import Located
from tqppo.queue.link.calls import NOT_YET, Distant, Pulse

METHODS = frozenset({"publish", "room", "release", "tag", "clear", "locate", "list", "wait", "stats"})
WHO = "the queue's index"

_HELLO_BYTES = 64
_LENGTH = struct.Struct("<I")
_OK, _REFUSED, _NOT_PLAIN = 0, 1, 2
_HOLD = "hold"  # the only request without an answer
_CHUNK = 1 << 16

Gone = Callable[[], Awaitable[Any]]  # ends when whoever asked does
Handle = Callable[[str, tuple[Any, ...], float, Gone], Awaitable[Any]]


class NotPlain(Exception):
    """The answer is more than JSON and waits to be collected by another way, under this number."""

    def __init__(self, ticket: int) -> None:
        super().__init__(ticket)
        self.ticket = ticket


def _address(spec: StorageSpec) -> str:
    return f"\0tqppo-{spec.run}"  # Linux's abstract namespace


def _hello(spec: StorageSpec) -> bytes:
    return spec.token.encode().ljust(_HELLO_BYTES, b"\0")[:_HELLO_BYTES]


# -- values ----------------------------------------------------------------------------------------------------------


def _frame(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), default=_described).encode()
    return _LENGTH.pack(len(text)) + text


def _described(value: Any) -> Any:
    if isinstance(value, Locator):
        return {"\0locator": [value.node, value.block, value.num_bytes, value.place]}
    if isinstance(value, Located):
        groups = [(names, _digits(block), _digits(row)) for names, block, row in value.groups]
        return {"\0located": [value.blocks, groups]}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _digits(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _numbers(digits: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(digits), "<i4")


def _value(data: bytes) -> Any:
    return json.loads(data, object_hook=_ours)


def _ours(found: dict[str, Any]) -> Any:
    if "\0locator" in found:
        return Locator(*found["\0locator"])
    if "\0located" in found:
        blocks, groups = found["\0located"]
        rows = [(names, _numbers(block), _numbers(row)) for names, block, row in groups]
        return Located([(number, locator) for number, locator in blocks], rows)
    return found


# -- the index's side ------------------------------------------------------------------------------------------------


class Desk:
    """Answers processes of this node."""

    def __init__(self, spec: StorageSpec, handle: Handle) -> None:
        self._spec, self._handle = spec, handle
        self._server: asyncio.AbstractServer | None = None
        self._waiting: dict[int, Any] = {}  # answers that are not plain, by ticket
        self._tickets = itertools.count()

    async def open(self) -> None:
        """Listen, where the system has such sockets; elsewhere all calls go through Ray."""
        if self._server is None and sys.platform == "linux":
            self._server = await asyncio.start_unix_server(self._talk, _address(self._spec), backlog=1024)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def collect(self, ticket: int) -> Any:
        return self._waiting.pop(ticket)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        given = Given()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            if hmac.compare_digest(await reader.readexactly(_HELLO_BYTES), _hello(self._spec)):
                while True:
                    size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                    request = await reader.readexactly(size)
                    writer.write(await self._answer(request, lambda: reader.read(1), given))
                    await writer.drain()
        writer.close()
        for ticket in given.answers:
            self._waiting.pop(ticket, None)
        for client in given.clients:
            await self._handle("release", (client,), 0.0, reader.read)

    async def _answer(self, request: bytes, gone: Gone, given: Given) -> bytes:
        try:
            method, args, timeout_s = _value(request)
            if method == _HOLD:
                given.clients.append(args[0])
                return b""
            answer = await self._handle(method, tuple(args), timeout_s, gone)
        except ConnectionError:
            raise
        except TqppoError as error:
            return _frame([_REFUSED, [type(error).__name__, str(error)]])
        except Exception as error:  # noqa: BLE001 (a mistake of ours; whoever asked shall hear of it)
            return _frame([_REFUSED, ["QueueError", f"the index failed: {type(error).__name__}: {error}"]])
        try:
            return _frame([_OK, answer])
        except TypeError:
            ticket = next(self._tickets)
            self._waiting[ticket] = answer
            given.answers.append(ticket)
            return _frame([_NOT_PLAIN, ticket])


@dataclass(frozen=True, slots=True)
class Given:
    """What goes with a connection: the tickets of a client whose life it is, answers that were not collected."""

    clients: list[str] = field(default_factory=list)
    answers: deque[int] = field(default_factory=lambda: deque(maxlen=256))


# -- the clients' side -----------------------------------------------------------------------------------------------


class Wire:
    """Connections of one process to the index: as many as calls are under way at once, used again."""

    def __init__(self, spec: StorageSpec) -> None:
        self._spec = spec
        self._idle: list[socket.socket] = []
        self._life: tuple[str, socket.socket] | None = None
        self._process = os.getpid()
        self._not_plain: set[str] = set()

    def client(self) -> str:
        """A name for this process, and a connection that ends with it: then all tickets of that name are released."""
        self._forget_the_parent()
        if self._life is None:
            connection, name = self._connection(), uuid.uuid4().hex
            if connection is None:
                return name
            try:
                connection.sendall(_frame([_HOLD, [name], 0.0]))
            except OSError:  # nobody is there; the call that follows will say so
                connection.close()
                return name
            self._life = name, connection
        return self._life[0]

    def call(
        self, method: str, args: Sequence[Any], timeout_s: float, grace_s: float, pulses: Sequence[Pulse] = ()
    ) -> Exchange | None:
        """None: this call is not for the wire."""
        if method not in METHODS or method in self._not_plain:
            return None
        try:
            frame = _frame([method, args, timeout_s])
        except TypeError:
            return None
        connection = self._connection()
        return None if connection is None else Exchange(self, connection, frame, method, timeout_s + grace_s, pulses)

    def _connection(self) -> socket.socket | None:
        self._forget_the_parent()
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect(_address(self._spec))
            connection.sendall(_hello(self._spec))
        except OSError:
            connection.close()
            return None
        return connection

    def _forget_the_parent(self) -> None:
        if self._process != os.getpid():  # after a fork, the parent's connections are not ours
            self._idle, self._life, self._process = [], None, os.getpid()

    def take_back(self, connection: socket.socket) -> None:
        self._idle.append(connection)

    def read(self, data: bytes, method: str) -> Any:
        status, answer = _value(data)
        if status == _NOT_PLAIN:
            self._not_plain.add(method)
            raise NotPlain(answer)
        if status == _REFUSED:
            raise getattr(errors, answer[0], errors.QueueError)(answer[1])
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._life is not None:
            self._life[1].close()
            self._life = None


class Exchange(Distant):
    """One question and its answer. A connection that failed, or whose answer may still come, is not used again."""

    def __init__(
        self, wire: Wire, connection: socket.socket, frame: bytes, method: str, timeout_s: float,
        pulses: Sequence[Pulse] = (),
    ) -> None:  # fmt: skip
        super().__init__(WHO, timeout_s, pulses)
        self.wire, self.connection, self.method = wire, connection, method
        self._unsent, self._heard = memoryview(frame), bytearray()

    def _attempt(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            while self._unsent:
                self.connection.settimeout(_until(deadline))
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            while (missing := _missing(self._heard)) > 0:
                self.connection.settimeout(_until(deadline))
                self._heard += _something(self.connection.recv(max(missing, _CHUNK)))
        except TimeoutError:
            return NOT_YET
        return self._heard

    async def _answer(self) -> Any:
        self.connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, self._unsent)
        while (missing := _missing(self._heard)) > 0:
            self._heard += _something(await loop.sock_recv(self.connection, max(missing, _CHUNK)))
        return self._heard

    def _taken(self, answer: bytearray) -> Any:
        self.wire.take_back(self.connection)
        return self.wire.read(bytes(answer[_LENGTH.size :]), self.method)

    def _abandon(self) -> None:
        self.connection.close()


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # 0 would mean: do not wait at all


def _missing(buffer: bytearray) -> int:
    """Bytes until the frame is whole."""
    if len(buffer) < _LENGTH.size:
        return _LENGTH.size - len(buffer)
    return _LENGTH.size + _LENGTH.unpack_from(buffer)[0] - len(buffer)


def _something(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("it closed the connection")
    return data
