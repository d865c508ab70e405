"""Embedded, vLLM and SGLang on the same model and prompts, in one run; and a weight sync by model size.

Useful tokens per second and per CPU-second, of this process and the servers together. One thread each, temperature 1,
no end token, so that all produce the same number of tokens. `python tests/bench/rollout.py [BACKEND or MODEL …]`
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import OUTPUT, interleaved, publish
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from tqppo import plugins
from tqppo.engines import environments as engines
from tqppo.engines.together import generate_together
from tqppo.protocols import EngineSpec, Request, Sampling, WeightSource
from tqppo.tiny.model import write_tiny_model
from tqppo.weights.send import Sender, SenderClient

MODELS = {
    "0.1M": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
    "20M": {"hidden_size": 512, "num_layers": 6, "num_heads": 8},
}
COLUMNS = {
    "tokens": "tokens",
    "tokens_per_s": "tokens/s",
    "tokens_per_cpu_s": "tokens/CPU-s",
    "file_sync_s": "sync by file, s",
    "broadcast_sync_s": "by broadcast, s",
}
LOGS = OUTPUT / "rollout-logs"
NUM_PROMPTS, GROUP, NEW_TOKENS, REPEATS = 32, 8, 24, 5


def requests(round_number: int) -> list[Request]:
    rng = random.Random(7)
    prompts = [[rng.randrange(32, 127) for _ in range(rng.randrange(6, 25))] for _ in range(NUM_PROMPTS)]
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    return [
        Request(prompt, sampling, 1000 * i + session, f"{round_number}-{i}-{session}", (i, session))
        for i, prompt in enumerate(prompts)
        for session in range(GROUP)
    ]


class Subject:
    """A started engine, asked from plain functions."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop, self.rounds, self.num_tokens = engine, loop, 0, 0

    def generate(self) -> None:
        self.rounds += 1
        asked = requests(self.rounds)
        completions = self.loop.run_until_complete(generate_together(self.engine, asked))
        self.num_tokens = sum(len(found.tokens) for found in completions)

    def sync(self, source: WeightSource) -> None:
        self.loop.run_until_complete(self.engine.load_weights(source))


async def start(stack: AsyncExitStack, backend: str, model: Path) -> Any:
    spec = EngineSpec(model=str(model), max_context_tokens=128, name=backend, log_dir=str(LOGS))
    engine = plugins.load("rollout", backend)(spec)
    stack.push_async_callback(engine.close)
    began = time.perf_counter()
    await engine.start()
    print(f"{backend}: started in {time.perf_counter() - began:.0f} s", flush=True)
    return engine


def published(folder: Path, shape: dict[str, Any], seed: int) -> Path:
    """Weights as a trainer publishes them: in shared memory, with the head spelled out."""
    write_tiny_model(folder, seed=seed, **shape)
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_size(name: str, backends: list[str], loop: asyncio.AbstractEventLoop, folder: Path) -> dict[str, Any]:
    shape = MODELS[name]
    sources = [published(folder / f"{name}-{seed}", shape, seed) for seed in (0, 1)]
    stack = AsyncExitStack()
    try:
        subjects = {b: Subject(loop.run_until_complete(start(stack, b, sources[0])), loop) for b in backends}
        speed = interleaved({b: s.generate for b, s in subjects.items()}, repeats=REPEATS)
        sender = Sender()
        ways = {(b, "file"): syncer(s, sources, None) for b, s in subjects.items()}
        ways |= {
            (b, "broadcast"): syncer(s, sources, SenderClient(sender))
            for b, s in subjects.items()
            if s.engine.capabilities.broadcast
        }
        syncs = interleaved({f"{b} {way}": sync for (b, way), sync in ways.items()}, repeats=REPEATS)
    finally:
        loop.run_until_complete(stack.aclose())
    return {
        b: {
            "tokens": s.num_tokens,
            "tokens_per_s": s.num_tokens / speed[b].wall,
            "tokens_per_cpu_s": s.num_tokens / speed[b].cpu,
            **{f"{way}_sync_s": syncs[f"{b} {way}"].wall for other, way in ways if other == b},
        }
        for b, s in subjects.items()
    }


def syncer(subject: Subject, sources: list[Path], sender: SenderClient | None) -> Callable[[], None]:
    versions = itertools.count(1)

    def sync() -> None:
        version = next(versions)
        subject.sync(WeightSource(str(sources[version % 2]), version, sender=sender))

    return sync


def main() -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    models = [name for name in MODELS if name in sys.argv[1:]] or list(MODELS)
    wanted = [name for name in sys.argv[1:] if name not in MODELS] or ["embedded", "vllm", "sglang"]
    backends = [b for b in wanted if b not in engines.ENVIRONMENTS or engines.is_installed(b)]
    for missing in sorted(set(wanted) - set(backends)):
        print(f"{missing} is left out: `tqppo backends install {missing}` makes its environment")
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="tqppo-bench-", dir="/dev/shm") as folder:
        figures = {name: run_size(name, backends, loop, Path(folder)) for name in models}
    rows = [
        (f"{name} {backend}", *(found.get(column, "") for column in COLUMNS))
        for name, by_backend in figures.items()
        for backend, found in by_backend.items()
    ]
    title = f"{NUM_PROMPTS} prompts × {GROUP} sessions × {NEW_TOKENS} tokens, one thread per engine"
    publish("rollout", title, ("model and engine", *COLUMNS.values()), rows, figures)


if __name__ == "__main__":
    main()
