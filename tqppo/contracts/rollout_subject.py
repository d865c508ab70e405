"""The engine that the rollout contract tests, and its reference: an fp32 forward of the weights by `transformers`."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tqppo import plugins
from tqppo.engines.together import generate_together
from tqppo.protocols import (
    Completion,
    EngineSpec,
    Request,
    RolloutEngine,
    Sampling,
    Scores,
    WeightSender,
    WeightSource,
)
from tqppo.tiny.model import write_tiny_model
from tqppo.tiny.tokenizer import byte_tokenizer

T = TypeVar("T")
Fields = Mapping[str, Any]  # some fields of `Sampling` or `EngineSpec`
MAX_CONTEXT = 512
TIMEOUT_S = 120.0
EOS = int(byte_tokenizer().eos_token_id)
_NUMBERS = itertools.count()


def reference_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


class Subject:
    """The engine under test behind synchronous methods, and a reference model that always has the same weights."""

    def __init__(self, engine: RolloutEngine, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.folder = folder
        self.loop = loop
        self.version = 0
        self.sender: WeightSender | None = None
        self.reference = reference_model(folder)

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def generate(self, *requests: Request) -> list[Completion]:
        return self.run(generate_together(self.engine, requests))

    def score(
        self, *sequences: Sequence[int], top_k: int = 0, starts: Sequence[int] = (), hidden: bool = False
    ) -> list[Scores]:
        return self.run(self.engine.score_many(sequences, top_k, starts=starts, hidden=hidden))

    def load(self, folder: Path) -> None:
        """Load other weights into the engine and the reference."""
        self.version += 1
        self.run(self.engine.load_weights(WeightSource(str(folder), self.version, sender=self.sender)))
        self.reference = reference_model(folder)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The reference's logits after each token, [S, V]."""
        logits: Tensor = self.reference(torch.tensor([list(tokens)])).logits
        return logits[0]

    def expected_logprobs(self, request: Request, completion: Completion) -> Tensor:
        """Log-probabilities of a completion under the request's sampling distribution, [R]."""
        tokens = [*request.tokens, *completion.tokens]
        logits = self.logits(tokens)[len(request.tokens) - 1 : -1]
        logprobs = sampling_logprobs(logits, request.sampling, joint=self.engine.capabilities.joint_filters)
        return logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def sampling_logprobs(logits: Tensor, sampling: Sampling, *, joint: bool = False) -> Tensor:
    """Log-probabilities [N, V] after temperature, then top-k, then top-p of the rest (of all tokens if `joint`).

    Greedy is reported at temperature 1.
    """
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    for row in logprobs:
        order = row.argsort(descending=True)
        probabilities = row.softmax(-1)[order]
        if sampling.top_k:
            row[order[sampling.top_k :]] = -torch.inf
            probabilities = probabilities if joint else row.softmax(-1)[order]
        row[order[probabilities.cumsum(0) - probabilities >= sampling.top_p]] = -torch.inf
    return logprobs.log_softmax(-1)


def request(
    tokens: Sequence[int], *, seed: int = 0, order: tuple[int, ...] = (), session: str = "", **sampling: Any
) -> Request:
    return Request(tokens, Sampling(**sampling), seed, f"request-{next(_NUMBERS)}", order, session)


def prompts(count: int, *, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Printable prompts of mixed lengths, 2 tokens or more."""
    rng = random.Random(seed)
    return [[rng.randrange(32, 127) for _ in range(rng.randrange(2, longest + 1))] for _ in range(count)]


@pytest.fixture(scope="session")
def engine_options() -> Fields:
    """Further fields of `EngineSpec` that this back end needs on this machine."""
    return {}


@pytest.fixture(scope="session")
def tolerance(backend_name: str) -> float:
    """Largest difference of a log-probability to the reference; engines of other environments have other kernels."""
    return 1e-4 if plugins.load("rollout", backend_name).capabilities.needs_environment else 1e-5


@pytest.fixture(scope="session")
def event_loop_of_run() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def open_subject(
    name: str, folder: Path, loop: asyncio.AbstractEventLoop, options: Fields, log_dir: Path
) -> Iterator[Subject]:
    engine_type = plugins.load("rollout", name)
    settings = {
        "model": str(folder),
        "scores_hidden": engine_type.capabilities.score_hidden,
        "max_context_tokens": MAX_CONTEXT,
        "prefix_cache_bytes": 1 << 20,
        "eos_token_ids": (EOS,),
        "log_dir": str(log_dir),
        **options,
    }
    engine = engine_type(EngineSpec(**settings))
    try:
        loop.run_until_complete(engine.start())
        yield Subject(engine, folder, loop)
    finally:
        loop.run_until_complete(engine.close())
        loop.run_until_complete(engine.close())  # a second time must do nothing


@pytest.fixture(scope="session")
def subject(
    backend_name: str,
    engine_options: Fields,
    event_loop_of_run: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    """One engine for the whole run, on a tiny model with a tied head."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tied"), seed=1)
    logs = tmp_path_factory.mktemp("logs")
    yield from open_subject(backend_name, folder, event_loop_of_run, engine_options, logs)


@pytest.fixture
def untied_subject(
    backend_name: str,
    engine_options: Fields,
    event_loop_of_run: asyncio.AbstractEventLoop,
    tmp_path: Path,
) -> Iterator[Subject]:
    folder = write_tiny_model(tmp_path / "untied", tie_embeddings=False, seed=1)
    yield from open_subject(backend_name, folder, event_loop_of_run, engine_options, tmp_path)
