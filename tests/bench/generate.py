"""The embedded engine against `model.generate` on the same prompts: useful tokens per CPU-second and per second.

One thread, sampling at temperature 1. `generate` is given what it needs to stop each row at the same length as ours,
and neither sees an end token, so both produce the same number of tokens; ours also returns log-probabilities.
`python tests/bench/generate.py [BATCH …]`
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import interleaved, publish
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from tqppo import plugins
from tqppo.engines.together import generate_together
from tqppo.protocols import EngineSpec, Request, Sampling
from tqppo.tiny.model import write_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "0.1M": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
    "0.6M": {"hidden_size": 128, "num_layers": 4, "num_heads": 4},
}
REPEATS = 3


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens to add to each."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]


def workloads(batch: int) -> list[Workload]:
    rng = random.Random(batch)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(length)]

    equal = [prompt(8) for _ in range(batch)]
    mixed = [prompt(rng.randrange(4, 49)) for _ in range(batch)]
    groups = [p for p in (prompt(rng.randrange(6, 13)) for _ in range(batch // 8)) for _ in range(8)]
    return [
        Workload("equal", equal, [16] * batch),
        Workload("mixed", mixed, [rng.randrange(4, 65) for _ in mixed]),
        Workload("groups of 8", groups, [rng.randrange(4, 17) for _ in groups]),
    ]


class StopAt(StoppingCriteria):
    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


def generate(model: Any, work: Workload) -> None:
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in work.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts])
    criteria = StoppingCriteriaList([StopAt(longest + torch.tensor(work.new_tokens))])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max(work.new_tokens),
        pad_token_id=0,
        eos_token_id=None,
        stopping_criteria=criteria,
    )
    assert output.shape[1] == longest + max(work.new_tokens)


async def embedded(engine: Any, work: Workload) -> None:
    requests = [
        Request(prompt, Sampling(max_new_tokens=limit), seed=i, request_id=str(i), order=(i,))
        for i, (prompt, limit) in enumerate(zip(work.prompts, work.new_tokens, strict=True))
    ]
    completions = await generate_together(engine, requests)
    assert [len(completion.tokens) for completion in completions] == work.new_tokens


def measure(folder: Path, work: Workload) -> dict[str, float]:
    """Tokens per CPU-second and per second of both, and the ratios."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loop = asyncio.new_event_loop()
    spec = EngineSpec(model=str(folder), max_context_tokens=256, max_running=max(256, len(work.prompts)))
    engine = plugins.load("rollout", "embedded")(spec)
    loop.run_until_complete(engine.start())
    total = sum(work.new_tokens)
    rounds = max(1, 2_000 // total)  # long enough for the resolution of the CPU clock

    def several(run: Callable[[], Any]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(rounds):
                run()

        return repeated

    timings = interleaved(
        {
            "generate": several(lambda: generate(model, work)),
            "embedded": several(lambda: loop.run_until_complete(embedded(engine, work))),
        },
        repeats=REPEATS,
    )
    loop.run_until_complete(engine.close())
    loop.close()
    theirs, ours = timings["generate"], timings["embedded"]
    return {
        "generate_tokens_per_cpu_s": total * rounds / theirs.cpu,
        "embedded_tokens_per_cpu_s": total * rounds / ours.cpu,
        "cpu_ratio": theirs.cpu / ours.cpu,
        "wall_ratio": theirs.wall / ours.wall,
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    batches = [int(argument) for argument in sys.argv[1:]] or [8, 64, 256]
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as root:
        for size, shape in MODELS.items():
            folder = write_tiny_model(Path(root) / size, **shape)
            for batch in batches:
                for work in workloads(batch):
                    figure = measure(folder, work)
                    figures[f"{size} batch {batch} {work.name}"] = figure
                    rows.append([f"{size}, {work.name}", batch, *figure.values()])
    publish(
        "generate",
        "tokens per CPU-second, one thread",
        ["model, lengths", "batch", "model.generate", "embedded", "ratio", "ratio (wall)"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
