"""Scoring as a teacher does it: embedded, vLLM and SGLang, chosen tokens and top-64, and the answers of servers as
arrays against JSON. Bytes, seconds and CPU-seconds per scored row, of this process and the servers together.

32 sequences of 256 tokens, scored from row 64 on, one thread per engine. `python tests/bench/score.py [BACKEND …]`
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import OUTPUT, interleaved, publish
from transformers.utils import logging

from tqppo import plugins
from tqppo.engines import environments as engines
from tqppo.protocols import EngineSpec
from tqppo.tiny.model import write_tiny_model

NUM_SEQUENCES, LENGTH, START, TOP_K, REPEATS = 32, 256, 64, 64, 5
NUM_ROWS = NUM_SEQUENCES * (LENGTH - 1 - START)
COLUMNS = {
    "bytes_per_row": "bytes/row",
    "rows_per_s": "rows/s",
    "rows_per_cpu_s": "rows/CPU-s",
    "seconds": "s",
}


def sequences() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(32, 127) for _ in range(LENGTH)] for _ in range(NUM_SEQUENCES)]


class Scoring:
    """One way to score: an engine, a K, and how a server answers. Called to score all sequences once."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, top_k: int, *, compact: bool = True) -> None:
        self.engine, self.loop, self.top_k, self.compact = engine, loop, top_k, compact
        self.num_bytes = 0
        self.asked = sequences()

    def __call__(self) -> None:
        self.loop.run_until_complete(self._score())

    async def _score(self) -> None:
        server = await self.engine.servers.live() if hasattr(self.engine, "servers") else None
        if server is not None:
            self.engine.api.compact_scores = self.compact
        before = server.num_bytes_received if server is not None else 0
        await self.engine.score_many(self.asked, self.top_k, starts=[START] * len(self.asked))
        self.num_bytes = server.num_bytes_received - before if server is not None else 0


async def started(stack: AsyncExitStack, backend: str, model: Path) -> Any:
    spec = EngineSpec(
        model=str(model), max_context_tokens=LENGTH, name=f"score-{backend}", log_dir=str(OUTPUT / "score")
    )
    engine = plugins.load("rollout", backend)(spec)
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine


def measure(backends: Sequence[str], repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Figures by name: `vllm top-64 json` and so on, with the keys of `COLUMNS`."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    ways: dict[str, Scoring] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="tqppo-bench-") as folder:
            model = write_tiny_model(Path(folder))
            for backend in backends:
                engine = loop.run_until_complete(started(stack, backend, model))
                for top_k in (0, TOP_K):
                    name = f"{backend} top-{top_k}" if top_k else f"{backend} chosen"
                    ways[name] = Scoring(engine, loop, top_k)
                    if hasattr(engine, "servers"):
                        ways[f"{name} json"] = Scoring(engine, loop, top_k, compact=False)
            calls: dict[str, Callable[[], None]] = dict(ways)
            timings = interleaved(calls, repeats=repeats)
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
    return {
        name: {
            "bytes_per_row": ways[name].num_bytes / NUM_ROWS,
            "rows_per_s": NUM_ROWS / timing.wall,
            "rows_per_cpu_s": NUM_ROWS / timing.cpu,
            "seconds": timing.wall,
        }
        for name, timing in timings.items()
    }


def available(wanted: Sequence[str] = ("embedded", "vllm", "sglang")) -> list[str]:
    """The back ends of `wanted` that can be started on this machine."""
    return [b for b in wanted if b not in engines.ENVIRONMENTS or engines.is_installed(b)]


def main() -> None:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["embedded", "vllm", "sglang"]
    for missing in sorted(set(wanted) - set(available(wanted))):
        print(f"{missing} is left out: `tqppo backends install {missing}` makes its environment")
    figures = measure(available(wanted))
    rows = [(name, *(found[column] for column in COLUMNS)) for name, found in figures.items()]
    title = f"{NUM_SEQUENCES} sequences of {LENGTH} tokens, rows {START} and later, one thread per engine"
    publish("score", title, ("engine and answer", *COLUMNS.values()), rows, figures)


if __name__ == "__main__":
    main()
