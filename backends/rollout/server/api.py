"""The server of one kind of engine: how it is started, and what to ask it over HTTP.

A new server engine subclasses `ServerApi` and names it in a `ServerEngine`. Everything that is the same for all
servers (their life, retries, weight updates) is in the other files of this folder.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from tqppo.engines.capabilities import argument_name, instead_of
from tqppo.errors import BackendError, EngineError, PreflightError
from tqppo.protocols import Bucket, Completion, EngineSpec, Request, Scores
from tqppo.weights.identity import WeightReport

from .group import Rendezvous
from .http import EngineServer

CONTROL_TIMEOUT_S = 120.0  # of one request that generates nothing, such as a step of a weight update
EnginePart = Literal["weights", "cache"]
Arguments = dict[str, object]  # flags of a server without the leading dashes; None leaves a flag out


class ServerApi(ABC):
    """Methods with a `server` send requests to it; they raise `EngineError` when it refuses."""

    backend: ClassVar[str]
    """Name of the engine, as in `rollout.backend`."""
    has_no_flags: ClassVar[bool] = False
    """Whether the server understands `--no-NAME` for a flag that is false."""
    grace_s: ClassVar[float] = 5.0
    """Time between SIGTERM and SIGKILL."""
    dying_s: ClassVar[float] = 20.0
    """How long a server may take to end after it broke a connection; some write dumps first."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.model = str(Path(spec.model).resolve()) if Path(spec.model).is_dir() else spec.model  # or a hub name
        self.on_gpu = has_gpu() if spec.devices is None else bool(spec.devices)
        self.token = secrets.token_urlsafe(24)  # on loopback too: other users of the machine are there
        self.served_name = f"{spec.name}-{secrets.token_hex(4)}"  # random, so that another server is not taken for ours
        self.weight_label: str | None = None  # the name under which the server has the weights that were loaded last
        self.numbers = itertools.count()  # for ids of requests
        self.compact_scores = True  # ask for scores as arrays; false: as JSON, which every version answers
        self._user_arguments = self._checked(spec.engine_args)

    @abstractmethod
    def command(self, python: str, port: int) -> list[str]:
        """Command line of the server, up to its flags."""

    @abstractmethod
    def arguments(self) -> Arguments:
        """Flags of the server, without model, host and port."""

    def environment(self) -> dict[str, str]:
        """Environment variables of the server, on top of this process's."""
        return {}

    @abstractmethod
    async def inspect(self, server: EngineServer) -> None:
        """Raise unless the server is the one that was started, or one to attach to with a usable version and model."""

    @abstractmethod
    async def generate(self, server: EngineServer, request: Request, request_id: str) -> Completion:
        """Answer a request; `weight_version` of the completion is filled in by the engine."""

    @abstractmethod
    async def score(
        self, server: EngineServer, tokens: Sequence[int], top_k: int, start: int, *, hidden: bool
    ) -> Scores:
        """See `RolloutEngine.score`; at least one row is asked for. `hidden` only if the engine is capable of it."""

    @abstractmethod
    async def abort(self, server: EngineServer, request_id: str) -> None:
        """End a request early; the server may not know it yet."""

    async def begin_update(self, server: EngineServer) -> None:  # noqa: B027 - optional
        """Prepare for new weights, for example by pausing generation."""

    @abstractmethod
    async def load_folder(self, server: EngineServer, folder: str) -> None:
        """Load the weights of a Hugging Face folder."""

    async def join_group(self, server: EngineServer, rendezvous: Rendezvous) -> None:
        """Join the process group that weights are broadcast in."""
        raise EngineError(f"{self.backend} does not take weights by broadcast")

    async def receive_buckets(self, server: EngineServer, group: str, buckets: Sequence[Bucket]) -> None:
        """Receive and load what rank 0 of the group broadcasts."""
        raise EngineError(f"{self.backend} does not take weights by broadcast")

    @abstractmethod
    async def finish_update(self, server: EngineServer, label: str) -> None:
        """Name the new weights, drop caches that the old ones filled, and go on generating."""

    @abstractmethod
    async def loaded_label(self, server: EngineServer) -> str:
        """The name under which the server has its weights now."""

    async def weight_reports(self, server: EngineServer) -> list[WeightReport] | None:
        """The checksums of the server's weights, one report per process; None if it cannot say."""
        return None

    async def sleep(self, server: EngineServer) -> None:  # noqa: B027 - optional
        """Free memory; there is nothing to free on a CPU."""

    async def wake(self, server: EngineServer, part: EnginePart) -> None:  # noqa: B027 - optional
        """Undo `sleep` for a part of the memory."""

    def flags(self) -> list[str]:
        """All flags, the user's `engine_args` included."""
        return to_flags(self.arguments() | self._user_arguments, negatable=self.has_no_flags)

    def check_label(self, found: set[str]) -> None:
        """Raise if an answer was made by other weights than those that were loaded last."""
        if self.weight_label is not None and found - {self.weight_label}:
            raise EngineError(f"{self.spec.name} answered with weights {sorted(found)}, not {self.weight_label!r}")

    def _checked(self, arguments: Mapping[str, object]) -> Arguments:
        """The user's arguments under their canonical names. Repeats a check of `validate-config`, because an engine
        can be made without a config."""
        for name in arguments:
            if instead := instead_of(self.backend, name):
                raise PreflightError(f"engine_args sets {name}, which tqppo sets itself for {self.backend}: {instead}")
        return {argument_name(name): value for name, value in arguments.items()}


def check_served_model(spec: EngineSpec, served: str) -> None:
    """Raise if a server to attach to has another model; the path to it may differ."""
    wanted = spec.model.rstrip("/")
    if served.rstrip("/") != wanted and Path(served).name != Path(wanted).name:
        raise BackendError(f"the server at {spec.endpoint} has the model {served!r}; this run needs {wanted!r}")


def tokens_left(spec: EngineSpec, request: Request) -> int:
    """The number of tokens that a request may add."""
    room = spec.max_context_tokens - len(request.tokens)
    if room < 1:
        raise EngineError(
            f"a prompt of {len(request.tokens)} tokens leaves no room in a context of "
            f"{spec.max_context_tokens} (rollout.max_context_tokens)"
        )
    return min(request.sampling.max_new_tokens, room)


def has_gpu() -> bool:
    """Whether a GPU is visible to this process; asks no library, since the trainer's torch may be another build."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible not in ("", "-1") and bool(glob.glob("/dev/nvidia[0-9]*"))


def to_flags(arguments: Mapping[str, object], *, negatable: bool) -> list[str]:
    """`{"a-b": 1, "c": True}` → `--a-b 1 --c`. False is `--no-c` where the server knows that form, else left out."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags += [f"--no-{name}"] if negatable else []
        elif isinstance(value, Mapping):
            flags += [f"--{name}", json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags
