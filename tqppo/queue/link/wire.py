"""Calls to an index on the same node: JSON over a local socket instead of Ray actor calls.

`make bench-queue` compares both: the lines by "over ray" make the same calls through Ray.

The socket is in Linux's abstract namespace, so no file is left when its process ends. A client proves itself with the
run's token. When a connection closes, the server takes back what its client reserved. Values that JSON cannot hold
travel through Ray.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import itertools
import json
import os
import resource
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
from tqppo.queue.index.answers import Located
from tqppo.queue.link.replies import NOT_YET, Heartbeat, RemoteReply
from tqppo.queue.storage import Locator, StorageSpec

METHODS = frozenset({"publish", "room", "release", "tag", "clear", "locate", "list", "wait", "stats"})
INDEX = "the queue's index"  # in messages

_HELLO_BYTES = 64
_CONNECT_S = 1.0  # on this machine; a call without a connection goes through Ray, which pings the index
_HELLO_S = 1.0  # a client sends its token as it connects
_HELLO_ATTEMPTS = 30  # of a client on a busy machine, which was held up between connecting and sending
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of a socket's other end
_LENGTH = struct.Struct("<I")
_OK, _ERROR, _NOT_JSON = 0, 1, 2
_REGISTER = "register"  # names the client of a connection; the only request without an answer
_CHUNK = 1 << 16

Disconnected = Callable[[], Awaitable[Any]]  # returns when the caller's connection closes
Handle = Callable[[str, tuple[Any, ...], float, Disconnected], Awaitable[Any]]


class NotJson(Exception):
    """The answer is not JSON; the server keeps it, under this number, to be collected through Ray."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _address(spec: StorageSpec) -> str:
    return f"\0tqppo-{spec.run}"  # the NUL selects the abstract namespace


def _hello(spec: StorageSpec) -> bytes:
    return spec.token.encode().ljust(_HELLO_BYTES, b"\0")[:_HELLO_BYTES]


# -- values ----------------------------------------------------------------------------------------------------------


def _frame(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), default=_to_json).encode()
    return _LENGTH.pack(len(text)) + text


def _to_json(value: Any) -> Any:
    if isinstance(value, Locator):
        return {"\0locator": [value.node, value.block, value.num_bytes, value.place]}
    if isinstance(value, Located):
        groups = [(names, _encoded(block), _encoded(row)) for names, block, row in value.groups]
        return {"\0located": [value.blocks, groups]}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _encoded(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _decoded(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<i4")


def _value(data: bytes) -> Any:
    return json.loads(data, object_hook=_from_json)


def _from_json(found: dict[str, Any]) -> Any:
    if "\0locator" in found:
        return Locator(*found["\0locator"])
    if "\0located" in found:
        blocks, groups = found["\0located"]
        rows = [(names, _decoded(block), _decoded(row)) for names, block, row in groups]
        return Located([(number, locator) for number, locator in blocks], rows)
    return found


# -- the index's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Connected:
    """What the server releases when a connection closes."""

    clients: list[str] = field(default_factory=list)  # prefixes of their tickets
    uncollected: deque[int] = field(default_factory=lambda: deque(maxlen=256))  # numbers of answers


class SocketServer:
    """Answers the calls of processes on the index's node."""

    def __init__(self, spec: StorageSpec, handle: Handle) -> None:
        self._spec, self._handle = spec, handle
        self._server: asyncio.AbstractServer | None = None
        self._uncollected: dict[int, Any] = {}  # answers that are not JSON, by number
        self._numbers = itertools.count()
        self._writers: set[asyncio.StreamWriter] = set()  # of open connections
        self._num_silent = 0

    async def open(self) -> None:
        """Listen, on Linux; on other systems all calls go through Ray."""
        if self._server is None and sys.platform == "linux":
            self._server = await asyncio.start_unix_server(self._serve, _address(self._spec), backlog=1024)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    def collect(self, number: int) -> Any:
        return self._uncollected.pop(number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = _Connected()
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            if _is_same_user(writer) and self._num_silent < _most_silent() and await self._knows_token(reader):
                while True:
                    size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                    request = await reader.readexactly(size)
                    writer.write(await self._answer(request, lambda: reader.read(1), connected))
                    await writer.drain()
        self._writers.discard(writer)
        writer.close()
        for number in connected.uncollected:
            self._uncollected.pop(number, None)
        for client in connected.clients:
            await self._handle("release", (client,), 0.0, reader.read)

    async def _knows_token(self, reader: asyncio.StreamReader) -> bool:
        self._num_silent += 1
        try:
            hello = await asyncio.wait_for(_read_hello(reader), 2 * _HELLO_S)
        except asyncio.TimeoutError:
            return False
        finally:
            self._num_silent -= 1
        return hmac.compare_digest(hello, _hello(self._spec))

    async def _answer(self, request: bytes, disconnected: Disconnected, connected: _Connected) -> bytes:
        try:
            method, args, timeout_s = _value(request)
            if method == _REGISTER:
                connected.clients.append(args[0])
                return b""
            answer = await self._handle(method, tuple(args), timeout_s, disconnected)
        except ConnectionError:
            raise
        except TqppoError as error:
            return _frame([_ERROR, [type(error).__name__, str(error)]])
        except Exception as error:  # noqa: BLE001 (a bug in the index must reach the caller, not end the connection)
            return _frame([_ERROR, ["QueueError", f"the index failed: {type(error).__name__}: {error}"]])
        try:
            return _frame([_OK, answer])
        except TypeError:
            number = next(self._numbers)
            self._uncollected[number] = answer
            connected.uncollected.append(number)
            return _frame([_NOT_JSON, number])


def _most_silent() -> int:
    """Number of connections that may be open without having sent a token. Half of the descriptors stay for others."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


async def _read_hello(reader: asyncio.StreamReader) -> bytes:
    """The first bytes of a connection. An event loop that was held up gets to see what came in time after all."""
    try:
        return await asyncio.wait_for(reader.readexactly(_HELLO_BYTES), _HELLO_S)
    except asyncio.TimeoutError:
        return await asyncio.wait_for(reader.readexactly(_HELLO_BYTES), 0.01)


def _is_same_user(writer: asyncio.StreamWriter) -> bool:
    """Whether the caller is a process of this user. Others could keep connections open until there are no more."""
    caller: socket.socket = writer.get_extra_info("socket")
    _, user, _ = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


# -- the clients' side -----------------------------------------------------------------------------------------------


class SocketClient:
    """Connections of one process to the index: one per concurrent call, reused."""

    def __init__(self, spec: StorageSpec) -> None:
        self._spec = spec
        self._idle: list[socket.socket] = []
        self._registered: tuple[str, socket.socket] | None = None
        self._process = os.getpid()
        self._not_json: set[str] = set()  # methods

    def client_name(self) -> str:
        """This process's name for tickets. Its connection stays open until the process ends, and then the server
        releases all tickets that begin with the name."""
        self._drop_connections_of_parent()
        if self._registered is None:
            connection, name = self._connection(), uuid.uuid4().hex
            if connection is None:
                return name
            try:
                connection.sendall(_frame([_REGISTER, [name], 0.0]))
            except OSError:  # the call that follows reports that the index is gone
                connection.close()
                return name
            self._registered = name, connection
        return self._registered[0]

    def call(
        self, method: str, args: Sequence[Any], timeout_s: float, grace_s: float, heartbeats: Sequence[Heartbeat] = ()
    ) -> SocketCall | None:
        """A call over the socket; None if this one must go through Ray."""
        if method not in METHODS or method in self._not_json:
            return None
        try:
            frame = _frame([method, args, timeout_s])
        except TypeError:
            return None
        connection = self._connection()
        if connection is None:
            return None
        return SocketCall(self, connection, frame, method, timeout_s + grace_s, heartbeats)

    def _connection(self) -> socket.socket | None:
        self._drop_connections_of_parent()
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        for _ in range(_HELLO_ATTEMPTS):
            begin = time.monotonic()
            connection = _connected(self._spec)
            if connection is None or time.monotonic() - begin < _HELLO_S / 2:
                return connection
            connection.close()  # the server may have given it up
        return None

    def _drop_connections_of_parent(self) -> None:
        """After a fork, the connections still belong to the parent."""
        if self._process != os.getpid():
            self._idle, self._registered, self._process = [], None, os.getpid()

    def take_back(self, connection: socket.socket) -> None:
        self._idle.append(connection)

    def read(self, data: bytes, method: str) -> Any:
        status, answer = _value(data)
        if status == _NOT_JSON:
            self._not_json.add(method)
            raise NotJson(answer)
        if status == _ERROR:
            raise getattr(errors, answer[0], errors.QueueError)(answer[1])
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._registered is not None:
            self._registered[1].close()
            self._registered = None


def _connected(spec: StorageSpec) -> socket.socket | None:
    """A new connection whose token is sent; None if the server cannot be reached."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(_CONNECT_S)  # the index may stand still with as many callers waiting as the kernel takes
    try:
        connection.connect(_address(spec))
        connection.sendall(_hello(spec))
    except OSError:
        connection.close()
        return None
    return connection


class SocketCall(RemoteReply[Any]):
    """One request and its answer. After a failure or a timeout its connection is closed, because a late answer on it
    would be taken for that of the next call."""

    def __init__(
        self, client: SocketClient, connection: socket.socket, frame: bytes, method: str, timeout_s: float,
        heartbeats: Sequence[Heartbeat] = (),
    ) -> None:  # fmt: skip
        super().__init__(INDEX, timeout_s, heartbeats)
        self.client, self.connection, self.method = client, connection, method
        self._unsent, self._received = memoryview(frame), bytearray()

    def _attempt(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            while self._unsent:
                self.connection.settimeout(_seconds_until(deadline))
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            while (missing := _missing(self._received)) > 0:
                self.connection.settimeout(_seconds_until(deadline))
                self._received += _not_empty(self.connection.recv(max(missing, _CHUNK)))
        except TimeoutError:
            return NOT_YET
        return self._received

    async def _answer(self) -> Any:
        self.connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, self._unsent)
        while (missing := _missing(self._received)) > 0:
            self._received += _not_empty(await loop.sock_recv(self.connection, max(missing, _CHUNK)))
        return self._received

    def _taken(self, answer: bytearray) -> Any:
        self.client.take_back(self.connection)
        return self.client.read(bytes(answer[_LENGTH.size :]), self.method)

    def _abandon(self) -> None:
        self.connection.close()


def _seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # a socket takes 0 for "do not wait at all"


def _missing(buffer: bytearray) -> int:
    """Bytes that a frame still lacks."""
    if len(buffer) < _LENGTH.size:
        return _LENGTH.size - len(buffer)
    (size,) = _LENGTH.unpack_from(buffer)
    return _LENGTH.size + int(size) - len(buffer)


def _not_empty(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("it closed the connection")
    return data
