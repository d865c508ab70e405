"""The contracts between tqppo and its engines; `queue/storage.py` has that of storages. Imports no torch.

A back end is one file in `backends/` (or a third party's package), registered as an entry point and
proved by the contract tests: `tqppo backends check rollout|storage NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from tqppo.devices.seats import Seat

FinishReason = Literal["stop", "length", "abort"]
Metrics = dict[str, float]  # keys like "actor/kl"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; temperature 0 is greedy. Log-probabilities are of the tempered, filtered distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: continue these tokens. `order` sorts requests that arrive together, so that timing never shows.

    Requests of one `session` mostly begin with the tokens of the one before, whose cache an engine may have kept. The
    name of a sub-agent's session is its parent's, a slash and a name of its own.
    """

    tokens: Sequence[int]
    sampling: Sampling
    seed: int
    request_id: str
    order: tuple[int, ...] = ()
    session: str = ""

    @property
    def family(self) -> str:
        """The session that `expect` and `end_session` know: this one's, or the one whose sub-agent it is."""
        return self.session.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens (the stop token included, when one was sampled), each with its log-probability."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    reused_tokens: int = 0  # of the request, not computed again because the engine had their cache


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a given sequence of S tokens at temperature 1.

    Row i is about token i + 1. The last row and the rows that were not asked for are 0. Top tokens come likeliest
    first. `hidden` has the inputs of the output head: `hidden @ head.T` are the logits, up to the scaling and capping
    that the architecture applies after its head.
    """

    logprobs: np.ndarray  # float32 [S]
    top_ids: np.ndarray  # int32 [S, K]
    top_logprobs: np.ndarray  # float32 [S, K]
    hidden: np.ndarray | None = None  # float32 [S, H]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type that travel as one piece, in this order."""

    names: list[str]
    dtype: str  # as torch calls it: "float32"
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Offer:
    """Where to meet the sender of weights, and what it will send."""

    host: str
    port: int
    buckets: list[Bucket]


@dataclass(frozen=True, slots=True)
class Party:
    """Engines, by name, that receive one version of the weights together. Each transfer has a party of its own name."""

    name: str
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """An engine of a party: the server that it has now, and its processes that receive weights."""

    engine: str
    server: str
    num_ranks: int
    backend: str  # of the process group: "nccl" or "gloo"


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A member's place in the process group of its party: its ranks begin with `first_rank`, the sender is rank 0."""

    group: str
    first_rank: int
    num_ranks: int  # of the whole group
    is_new: bool  # to be joined; otherwise it is that of an earlier party with the same members


class WeightSender(Protocol):
    """The way to published weights from another node. What fails raises EngineError.

    - `meet` waits for all engines of a party and gives each its place in one process group. A new group has to be
      joined by every member at the offer's address (a TCP store, keys prefixed by the group's name) while `join` has
      the sender do the same. `send` then broadcasts the buckets as bytes, one by one, to all of them at once.
    - `join` and `send` are called by each member: the sender does them once, and every call returns when they are done.
    - `leave` says why a member gives up, which ends the transfer for the others with that reason (`PeerFailed`).
    - `files` and `read` are for engines that can only load files.
    """

    async def offer(self, folder: str, bucket_bytes: int) -> Offer: ...
    async def meet(self, party: Party, member: Member, timeout_s: float) -> GroupPlace: ...
    async def join(self, party: Party, timeout_s: float) -> None: ...
    async def send(self, party: Party, folder: str, bucket_bytes: int) -> None: ...
    async def leave(self, party: Party, why: str) -> None: ...
    async def files(self, folder: str) -> dict[str, int]: ...
    async def read(self, folder: str, name: str, begin: int, num_bytes: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights to load: a Hugging Face folder (usually in shared memory) with `model.safetensors`, and their version.

    With a `sender` the folder is the sender's to open, and an engine that can (`EngineCapabilities.broadcast`) gets
    the weights from it, together with its `party`; engines that cannot never see such a source.
    """

    folder: str
    version: int
    node: str = ""  # Ray's name of the node that has the folder; empty: this one
    sender: WeightSender | None = None
    party: Party | None = None  # None: the engine receives alone
    checksums: Mapping[str, str] = field(default_factory=dict)  # by tensor, see `weights.checksum`; empty: not compared


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of one engine: plain values, never the whole config."""

    model: str  # a Hugging Face folder or hub name
    max_context_tokens: int
    max_running: int = 256
    prefix_cache_bytes: int = 0  # for caches of sessions between turns; servers have their own
    dtype: str = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    eos_token_ids: tuple[int, ...] = ()
    deterministic: bool = True
    threads: int = 1
    seed: int = 0
    name: str = "rollout-0"  # of this replica, for messages and log files
    log_dir: str = ""
    python: str = ""
    endpoint: str = ""  # attach to this server instead of starting one
    host: str = "127.0.0.1"
    interface: str = "lo"  # network interface for process groups with the trainer
    devices: tuple[str, ...] | None = None  # GPUs by CUDA's numbers; none: the CPU; None: whatever this process sees
    tensor_parallel: int = 1
    memory_fraction: float = 0.6
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    max_restarts: int = 3
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    scores_hidden: bool = False  # `score` will be asked for hidden states, which servers give only if they know it

    def on(self, seat: Seat) -> EngineSpec:
        """The settings with the GPUs of this seat. A server to attach to has its own, which are not known here."""
        return self if self.endpoint else replace(self, devices=seat.engine_devices)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What `validate-config` may rely on without starting the engine."""

    score_top_k: int = 0  # largest K of `score`; 0: cannot score
    score_hidden: bool = False  # `score` can return hidden states
    needs_environment: bool = False  # runs in an interpreter of its own
    attach: bool = False  # can use servers that already run
    tensor_parallel: bool = False
    deterministic: bool = False  # same bytes for the same seed, whatever the timing
    reserves_memory: bool = True  # takes `memory_fraction` of its GPU, of which its cache gets what the weights leave
    keeps_prefixes: bool = False  # keeps caches of sessions between turns within `rollout.prefix_cache_gb`
    maps_weights: bool = False  # on a CPU its parameters are the published file itself, with no copy to compare
    broadcast: bool = False  # takes weights from a process group
    joint_filters: bool = False  # top-p counts the mass of the whole distribution, not of what top-k leaves


@dataclass(frozen=True, slots=True)
class Incident:
    """A process that died, stood still or was late, and was replaced."""

    process: str
    what: str


@runtime_checkable
class ReportsIncidents(Protocol):
    """An engine that replaces processes which die. Optional: an engine without has nothing to report."""

    def take_incidents(self) -> list[Incident]:
        """What happened since the last call."""


class RolloutEngine(Protocol):
    """Token ids in, token ids out, asynchronous. All methods run on one event loop.

    - `start` loads the model (and starts processes); the constructor starts nothing.
    - `generate`, `score` and `score_many` may be called concurrently, in any number.
    - `score` computes the rows from `start` on. `hidden` asks for the hidden states too.
    - `score_many` scores sequences, each from its own start (all from 0 if `starts` is empty), as a batch of their own:
      a deterministic engine returns the same bytes for the same arguments, whatever else it is computing.
    - `expect(sessions, batch)` announces sessions. A deterministic engine admits the requests of a batch's sessions
      together, turn by turn and ordered by `Request.order`: it waits until each session has asked or ended. Other
      engines ignore it.
    - `end_session` says that a session makes no more requests; the engine releases what it keeps for it. It may be
      called for sessions that the engine does not know.
    - A `generate` call that is cancelled ends its request on the engine.
    - `load_weights` returns when every later completion comes from the new weights and carries their version. Raises
      if the source has checksums and the engine's tensors have others.
    - `sleep` frees the device's memory and keeps the weights on the host; `wake` takes it again. With `cache=False`
      only the weights return, so that new ones can be loaded; a second `wake` then brings the cache.
    - `held_bytes` is the memory on each of its devices now; None: `memory_fraction` of the device.
    - `close` leaves no process, thread or file behind, whatever happened before; it may be called twice.
    """

    capabilities: ClassVar[EngineCapabilities]

    def __init__(self, spec: EngineSpec) -> None: ...
    async def start(self) -> None: ...
    def expect(self, sessions: Sequence[str], batch: str = "") -> None: ...
    def end_session(self, session: str) -> None: ...
    async def generate(self, request: Request) -> Completion: ...
    async def abort(self, request_id: str) -> None: ...
    async def score(self, tokens: Sequence[int], top_k: int = 0, *, start: int = 0, hidden: bool = False) -> Scores: ...
    async def score_many(
        self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, starts: Sequence[int] = (), hidden: bool = False
    ) -> list[Scores]: ...
    async def load_weights(self, source: WeightSource) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self, *, cache: bool = True) -> None: ...
    def held_bytes(self) -> int | None: ...
    async def close(self) -> None: ...
