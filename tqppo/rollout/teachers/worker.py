"""A replica of a teacher: a frozen engine in a process of its own that scores rows of the queue.

It is called by rollout workers with keys, reads the tokens from the queue, and puts what the teacher says of them back
on the same rows. Nothing but names and figures passes through its callers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from tqppo import plugins
from tqppo.processes.nodes import this_node
from tqppo.protocols import EngineSpec, RolloutEngine, Scores
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.rollout.teachers.cache import ScoreCache, request_key
from tqppo.rollout.teachers.fingerprint import model_fingerprint

log = logging.getLogger(__name__)

PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """How to make one replica; plain values of its own section, no config."""

    name: str
    backend: str
    engine: EngineSpec
    top_k: int = 0
    hidden: bool = False
    hidden_dtype: str = "float32"
    vocabulary: int = 256  # tokens that the student can sample
    cache_path: str = ""
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadyTeacher:
    """What a replica says of itself when it is ready."""

    fingerprint: str  # of the model's files; empty if a server elsewhere has them
    probes: list[list[float]]  # log-probabilities of one fixed sequence, twice
    hidden_size: int
    node: str
    pid: int
    held_bytes: int | None = None  # on each of its devices; None: its share of the device


@dataclass(frozen=True, slots=True)
class RowsToScore:
    """Rows of the queue and how many of their tokens are prompt. Their teacher may have prompts of its own.

    `width` is the size of `teacher_hidden`, which all teachers of a run share.
    """

    batch: BatchMeta
    prompt_lengths: tuple[int, ...]
    own_prompts: tuple[tuple[int, ...], ...] = ()
    width: int = 0


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Figures of one call."""

    tokens: int  # that the engine computed
    cached_rows: int


@dataclass(frozen=True, slots=True)
class TeacherSequences:
    """Tokens to score, each from its first response token on: row `start` is about that token."""

    tokens: list[list[int]]
    starts: list[int]

    def take(self, places: Sequence[int]) -> TeacherSequences:
        return TeacherSequences([self.tokens[i] for i in places], [self.starts[i] for i in places])

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each sequence."""
        return [len(tokens) - 1 - start for tokens, start in zip(self.tokens, self.starts, strict=True)]


Answers = dict[str, np.ndarray]  # by column: one row for each response token of the sequences, one after the other


class TeacherWorker:
    """Scores on one engine. The constructor starts nothing, so that Ray can restart a dead replica."""

    def __init__(self, spec: TeacherSpec, queue: Queue) -> None:
        self.spec = spec
        self.queue = queue
        self.engine: RolloutEngine = plugins.load("rollout", spec.backend)(spec.engine)
        self.cache = ScoreCache(spec.cache_path or "unused", spec.cache_bytes if spec.cache_path else 0)
        self._starting = asyncio.Lock()
        self._log_file: logging.FileHandler | None = None
        self._fingerprint: str | None = None
        self._identity = ""  # the fingerprint, or what stands for it where the files are elsewhere

    @property
    def is_deterministic(self) -> bool:
        return self.engine.capabilities.deterministic and self.spec.engine.deterministic

    def __repr__(self) -> str:
        return self.spec.engine.name  # Ray writes this before the process's log lines

    async def start(self) -> ReadyTeacher:
        """Start the engine, and score a fixed sequence twice."""
        await self.ready()
        tokens = probe_tokens(self.spec)
        twice = [await self.engine.score(tokens, hidden=self.spec.hidden) for _ in range(2)]
        hidden = twice[0].hidden
        assert self._fingerprint is not None, "set when the engine started"
        return ReadyTeacher(
            fingerprint=self._fingerprint,
            probes=[scores.logprobs[:-1].tolist() for scores in twice],
            hidden_size=0 if hidden is None else int(hidden.shape[1]),
            node=this_node(),
            pid=os.getpid(),
            held_bytes=self.engine.held_bytes(),
        )

    async def score(self, rows: RowsToScore) -> ScoredRows:
        """Put the teacher's columns on these rows."""
        await self.ready()
        tokens = (await self.queue.aio.get(rows.batch, ["tokens"]))["tokens"]
        whole = [row.tolist() for row in tokens.unbind()]
        sequences = teachers_view(whole, rows)
        answers, report = await self._answers(sequences, rows.width)
        await self.queue.aio.put(rows.batch, self._columns(answers, sequences.lengths, rows))
        log.debug("scored %d rows, %d of them from the cache", len(whole), report.cached_rows)
        return report

    async def logprobs(self, tokens: list[list[int]], starts: list[int]) -> list[np.ndarray]:
        """Log-probabilities of the response tokens of these sequences: for validation, whose rows have no columns."""
        await self.ready()
        scores = await self.engine.score_many(tokens, starts=starts)
        return [each.logprobs[start:-1] for each, start in zip(scores, starts, strict=True)]

    async def close(self) -> None:
        self.cache.close()
        if self._log_file is not None:
            logging.getLogger("tqppo").removeHandler(self._log_file)
            self._log_file.close()
        await self.engine.close()

    async def ready(self) -> None:
        """Start the engine if it is not running. Every call does this first: Ray may have restarted the process."""
        async with self._starting:
            if self._fingerprint is not None:
                return
            self._log_to_file()
            log.info("%s: starting %s with %s", self, self.spec.backend, self.spec.engine.model)
            fingerprint = "" if self.spec.engine.endpoint else model_fingerprint(self.spec.engine.model)
            await self.engine.start()
            self._identity = fingerprint or await self._identity_of_server()
            self.cache.open()
            self._fingerprint = fingerprint
            log.info("%s: ready, fingerprint %s", self, self._identity)

    async def _identity_of_server(self) -> str:
        """Fingerprint of a remote server's model: its name and rounded scores."""
        scores = await self.engine.score(probe_tokens(self.spec))
        said = np.round(scores.logprobs.astype(np.float64), 1) + 0.0  # -0.0 becomes 0.0
        return blake2b(self.spec.engine.model.encode() + said.tobytes(), digest_size=16).hexdigest()

    def _log_to_file(self) -> None:
        """Write this process's log lines into the replica's file, where an engine's server writes its own."""
        if not self.spec.engine.log_dir or self._log_file is not None:
            return
        path = Path(self.spec.engine.log_dir) / f"{self.spec.engine.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = logging.FileHandler(path, mode="a")
        self._log_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours = logging.getLogger("tqppo")
        ours.addHandler(self._log_file)
        ours.setLevel(min(logging.INFO, ours.getEffectiveLevel()))

    # -- scores --------------------------------------------------------------------------------------------------------

    async def _answers(self, sequences: TeacherSequences, width: int) -> tuple[Answers, ScoredRows]:
        """What the teacher says of each response token, from the cache where possible.

        The scores of a deterministic engine are the same bytes for the same batch, so a batch is cached whole: parts
        of it, computed without the others, could differ in the last bits.
        """
        scorable = [place for place, length in enumerate(sequences.lengths) if length > 0]
        if not scorable:
            return self._no_answers(width), ScoredRows(0, 0)
        units = [scorable] if self.is_deterministic else [[place] for place in scorable]
        kind = f"{self.spec.top_k}/{self.spec.hidden}/{self.spec.hidden_dtype}"
        parts = [sequences.take(unit) for unit in units]
        keys = [request_key(self._identity, kind, part.tokens, part.starts) for part in parts]
        found = [self.cache.get(key) for key in keys]
        missing = [number for number, answer in enumerate(found) if answer is None]
        if missing:
            asked = TeacherSequences(
                [tokens for number in missing for tokens in parts[number].tokens],
                [start for number in missing for start in parts[number].starts],
            )
            scores = iter(await self._asked(asked))
            for number in missing:
                answer = joined([next(scores) for _ in parts[number].tokens])
                self.cache.put(keys[number], answer)
                found[number] = answer
        num_missing = sum(len(units[number]) for number in missing)
        num_tokens = sum(len(tokens) for number in missing for tokens in parts[number].tokens)
        return joined([each for each in found if each is not None]), ScoredRows(num_tokens, len(scorable) - num_missing)

    def _no_answers(self, width: int) -> Answers:
        """The columns of rows without a response token."""
        if self.spec.hidden:
            return {"teacher_hidden": as_numpy(torch.zeros(0, width, dtype=getattr(torch, self.spec.hidden_dtype)))}
        logprobs = np.zeros((0, self.spec.top_k or 1), np.float32)
        ids = {"teacher_ids": np.zeros((0, self.spec.top_k), np.int32)} if self.spec.top_k else {}
        return {**ids, "teacher_logprobs": logprobs}

    async def _asked(self, sequences: TeacherSequences) -> list[Answers]:
        scores = await self.engine.score_many(
            sequences.tokens, self.spec.top_k, starts=sequences.starts, hidden=self.spec.hidden
        )
        return [self._answer(each, start) for each, start in zip(scores, sequences.starts, strict=True)]

    def _answer(self, scores: Scores, start: int) -> Answers:
        """The rows that are about response tokens."""
        if self.spec.hidden:
            assert scores.hidden is not None, f"{self.spec.backend} returned no hidden states"
            exact = torch.from_numpy(np.ascontiguousarray(scores.hidden[start:-1]))
            return {"teacher_hidden": as_numpy(exact.to(getattr(torch, self.spec.hidden_dtype)))}
        if self.spec.top_k:
            return {"teacher_ids": scores.top_ids[start:-1], "teacher_logprobs": scores.top_logprobs[start:-1]}
        return {"teacher_logprobs": scores.logprobs[start:-1, None]}

    def _columns(self, answers: Answers, lengths: list[int], rows: RowsToScore) -> dict[str, Jagged]:
        """The answers as columns of the student's rows: 0 on the prompt and on the last token."""
        sizes = [prompt + length for prompt, length in zip(rows.prompt_lengths, lengths, strict=True)]
        begins = np.cumsum([0, *sizes])[:-1] + np.array(rows.prompt_lengths) - 1
        places = np.concatenate([np.arange(n) + begin for begin, n in zip(begins.tolist(), lengths, strict=True)])
        put: dict[str, Jagged] = {}
        for name, values in answers.items():
            width = max(rows.width, values.shape[1]) if name == "teacher_hidden" else values.shape[1]
            column = np.zeros((sum(sizes), width), values.dtype)
            column[places, : values.shape[1]] = values
            tensor = torch.from_numpy(column)
            if name == "teacher_hidden":
                tensor = tensor.view(getattr(torch, self.spec.hidden_dtype))
            put[name] = Jagged(tensor, torch.tensor(sizes))
        return put


def probe_tokens(spec: TeacherSpec) -> list[int]:
    """A fixed sequence, to compare replicas with each other and a teacher with its former self."""
    length = min(PROBE_TOKENS, spec.engine.max_context_tokens - 1)
    return [(7 * i * i + 3 * i + 1) % spec.vocabulary for i in range(length)]


def teachers_view(rows: list[list[int]], call: RowsToScore) -> TeacherSequences:
    """The sequences as the teacher reads them: the rows, or its own prompt and the student's response."""
    if not call.own_prompts:
        return TeacherSequences(rows, [length - 1 for length in call.prompt_lengths])
    tokens = [
        [*own, *row[length:]] for own, row, length in zip(call.own_prompts, rows, call.prompt_lengths, strict=True)
    ]
    return TeacherSequences(tokens, [len(own) - 1 for own in call.own_prompts])


def joined(answers: Sequence[Answers]) -> Answers:
    return {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as an array; numpy has no bfloat16, which becomes int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
