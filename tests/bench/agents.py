"""Agents: what keeping the caches of sessions between turns saves, and what keeping tensors out of the driver saves.

    make bench-agents
    python tests/bench/agents.py [--parts turns step] [--repeats N]

turns: sessions of eight turns whose contexts grow to two thousand tokens, on the embedded engine with and without kept
caches, and as a plain loop over `generate` of transformers, which gets all sessions as one batch per turn.
step: the data of one training step, from the worker that samples through five stages on two ranks each: once through
the queue, where the driver sends names, and once with the driver sending the tensors. The stages compute nothing; what
a small model would add on this machine (three forwards, one update, two ranks) is measured beside it, for the share of
a whole step.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "110")  # of a terminal that does not say: the table is wider than the usual 80

import ray
import torch
from harness import Timing, interleaved, publish
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tqppo import plugins
from tqppo.columns import Column, Kind, declare
from tqppo.protocols import EngineSpec, Request, Sampling
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.tiny.model import write_tiny_model

SESSIONS, TURNS = 8, 8
PROMPT, NEW, OBSERVED = 256, 32, 192  # tokens: of a prompt, of a turn, of a tool's result
CACHE_BYTES = 1 << 30
Payload = dict[str, Any]  # columns, dense or jagged: types of torch know no `offsets`


# -- turns -----------------------------------------------------------------------------------------------------------


def observation(session: int, turn: int, count: int) -> list[int]:
    rng = random.Random(1000 * session + turn)
    return [rng.randrange(256) for _ in range(count)]


class Player:
    """Plays all sessions on an engine, once per call."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop, self.rounds = engine, loop, 0
        self.prefilled: list[int] = []  # tokens of prompts computed in each turn of the last round

    def __call__(self) -> None:
        self.rounds += 1
        self.loop.run_until_complete(self._play())

    async def _play(self) -> None:
        names = [f"{self.rounds}-{i}" for i in range(SESSIONS)]
        contexts = [observation(i, -1, PROMPT) for i in range(SESSIONS)]
        self.engine.expect(names)
        self.prefilled = []
        for turn in range(TURNS):
            before = self.engine._decoder.num_prefilled
            asked = [
                Request(context, Sampling(max_new_tokens=NEW), 100 * i + turn, f"{name}-{turn}", (i,), name)
                for i, (name, context) in enumerate(zip(names, contexts, strict=True))
            ]
            done = await asyncio.gather(*map(self.engine.generate, asked))
            assert all(len(each.tokens) == NEW for each in done)
            self.prefilled.append(self.engine._decoder.num_prefilled - before)
            contexts = [
                [*context, *each.tokens, *observation(i, turn, OBSERVED)]
                for i, (context, each) in enumerate(zip(contexts, done, strict=True))
            ]
        for name in names:
            self.engine.end_session(name)


def plain_loop(model: Any) -> None:
    """One call of `generate` per turn, with every session's whole context."""
    contexts = [observation(i, -1, PROMPT) for i in range(SESSIONS)]
    for turn in range(TURNS):
        tokens = torch.tensor(contexts)
        made = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=True,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        contexts = [[*row, *observation(i, turn, OBSERVED)] for i, row in enumerate(made.tolist())]


def measure_turns(repeats: int) -> dict[str, Any]:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder), hidden_size=128, num_layers=4, num_heads=4)
        players = {}
        for name, kept in (("caches kept", CACHE_BYTES), ("recomputed", 0)):
            spec = EngineSpec(str(model), max_context_tokens=2048, prefix_cache_bytes=kept)
            players[name] = Player(plugins.load("rollout", "embedded")(spec), loop)
            loop.run_until_complete(players[name].engine.start())
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        alternatives: dict[str, Callable[[], None]] = {**players, "plain generate": lambda: plain_loop(plain)}
        timings = interleaved(alternatives, repeats=repeats)
        for player in players.values():
            loop.run_until_complete(player.engine.close())
    return show_turns(timings, {name: player.prefilled for name, player in players.items()})


def show_turns(timings: dict[str, Timing], prefilled: dict[str, list[int]]) -> dict[str, Any]:
    kept, recomputed = prefilled["caches kept"], prefilled["recomputed"]
    lengths = [PROMPT + turn * (NEW + OBSERVED) for turn in range(TURNS)]
    rows: list[list[Any]] = [[i + 1, lengths[i], recomputed[i], kept[i], recomputed[i] / kept[i]] for i in range(TURNS)]
    rows.append(["all", "", sum(recomputed), sum(kept), sum(recomputed) / sum(kept)])
    header = ["turn", "context", "prefilled again", "with kept caches", "× fewer"]
    publish("agents-prefill", f"Tokens prefilled by {SESSIONS} sessions", header, rows, prefilled)
    sampled = SESSIONS * TURNS * NEW
    slowest = timings["plain generate"]
    speed = [
        [name, sampled / each.wall, sampled / each.cpu, slowest.wall / each.wall, slowest.cpu / each.cpu]
        for name, each in timings.items()
    ]
    header = ["", "tokens/s", "tokens/CPU-s", "× plain", "× plain, CPU"]
    figures = {name: {"wall_s": each.wall_s, "cpu_s": each.cpu_s} for name, each in timings.items()}
    publish("agents-turns", f"Sampled tokens, {SESSIONS} sessions of {TURNS} turns", header, speed, figures)
    return figures


# -- step ------------------------------------------------------------------------------------------------------------

TEXT = ("bench_tokens", "bench_mask", "bench_logprobs")
IMAGE, REWARD = "bench_pixels", "bench_score"
# Stage → columns that it reads, column that it writes.
STAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "old logprobs": (("bench_tokens", IMAGE), "bench_old"),
    "reference": (("bench_tokens", IMAGE), "bench_ref"),
    "values": (("bench_tokens", IMAGE), "bench_values"),
    "advantages": (("bench_mask", "bench_old", "bench_ref", "bench_values", REWARD), "bench_advantages"),
    "update": (("bench_tokens", "bench_mask", "bench_old", "bench_advantages", IMAGE), ""),
}
PAYLOADS = {"text: 256 rows of 512–4096 tokens": (256, False), "images: 64 rows with 448×448 pixels": (64, True)}
RANKS = 2


def declare_columns() -> None:
    ragged = {"bench_tokens": "int64", "bench_mask": "bool"}
    written = [name for _, name in STAGES.values() if name]
    for name in (*TEXT, *written):
        declare(Column(name, Kind.RAGGED, ragged.get(name, "float32")))
    declare(Column(REWARD, Kind.ROW, "float32"))
    declare(Column(IMAGE, Kind.ROW, "float32", trailing=(None, None, None)))


def made(num_rows: int, has_images: bool) -> Payload:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(512, 4097, (num_rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    flat = {"bench_tokens": torch.arange(total), "bench_mask": torch.ones(total, dtype=torch.bool)}
    columns = {
        name: torch.nested.nested_tensor_from_jagged(flat.get(name, torch.zeros(total)), offsets) for name in TEXT
    }
    columns[REWARD] = torch.zeros(num_rows)
    return columns | ({IMAGE: torch.zeros(num_rows, 3, 448, 448)} if has_images else {})


def rows_of(columns: Payload, places: Sequence[int]) -> Payload:
    """Some rows of each column, as a driver cuts a batch for a rank."""
    first, end = places[0], places[-1] + 1
    found = {}
    for name, column in columns.items():
        if column.is_nested:
            offsets = column.offsets()[first : end + 1]
            values = column.values()[int(offsets[0]) : int(offsets[-1])].clone()
            found[name] = torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])
        else:
            found[name] = column[first:end].clone()
    return found


def joined(parts: Sequence[Any]) -> Tensor:
    values = torch.cat([part.values() for part in parts])
    lengths = torch.cat([part.offsets().diff() for part in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def touched(columns: Payload) -> int:
    """Read every byte, as a forward would."""
    plain = [column.values() if column.is_nested else column for column in columns.values()]
    return sum(int(each.reshape(-1).view(torch.uint8).count_nonzero()) for each in plain)


class Worker:
    """The worker that samples, or one rank of a stage."""

    def __init__(self, queue: Queue) -> None:
        declare_columns()
        self.queue = queue
        self.payload: Payload = {}

    def prepare(self, num_rows: int, has_images: bool) -> None:
        self.payload = made(num_rows, has_images)

    def sample_into_queue(self, keys: list[str], tags: list[dict[str, Any]]) -> BatchMeta:
        return self.queue.put(keys, self.payload, tags=tags)

    def sample(self) -> Payload:
        return self.payload

    def compute_in_queue(self, batch: BatchMeta, reads: tuple[str, ...], writes: str) -> None:
        found = self.queue.get(batch, list(reads))
        touched(found)
        if writes:
            self.queue.put(batch, {writes: _like(found)})

    def compute(self, columns: Payload, writes: str) -> Tensor | None:
        touched(columns)
        return _like(columns) if writes else None


def _like(columns: Payload) -> Tensor:
    ragged: Any = next(column for column in columns.values() if column.is_nested)
    zeros = torch.zeros(len(ragged.values()))
    return torch.nested.nested_tensor_from_jagged(zeros, ragged.offsets())


@dataclass
class StepBench:
    """One step, two ways. `sent` counts the bytes that pass through this process, the driver."""

    queue: Queue
    sampler: Any
    ranks: list[Any]
    num_rows: int
    has_images: bool
    sent: dict[str, int] = field(default_factory=lambda: {"queue": 0, "driver": 0})
    tensors: int = 0  # bytes of all columns

    def names(self, reads: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in reads if name != IMAGE or self.has_images)

    def places(self) -> list[range]:
        share = self.num_rows // RANKS
        return [range(rank * share, (rank + 1) * share) for rank in range(RANKS)]

    def through_queue(self) -> None:
        keys = [f"p0-0-{i}_0_0" for i in range(self.num_rows)]
        tags = [
            {"uid": key, "session": 0, "trajectory": 0, "prompt_len": 512, "response_len": 1000, "seq_len": 1512,
             "reward": 0.5, "turns": 3, "weight_version": 7, "order": i, "last": True}
            for i, key in enumerate(keys)
        ]  # fmt: skip
        batch = ray.get(self.sampler.sample_into_queue.remote(keys, tags))
        self.sent["queue"] = _size(batch)
        for reads, writes in STAGES.values():
            shares = [batch.take(place) for place in self.places()]
            calls = zip(self.ranks, shares, strict=True)
            ray.get([rank.compute_in_queue.remote(share, self.names(reads), writes) for rank, share in calls])
            self.sent["queue"] += sum(_size(share) for share in shares)
            batch = batch.with_columns(writes) if writes else batch
        self.queue.clear(batch)

    def through_driver(self) -> None:
        columns: Payload = dict(ray.get(self.sampler.sample.remote()))
        self.sent["driver"] = sum(_bytes(column) for column in columns.values())
        for reads, writes in STAGES.values():
            needed = {name: columns[name] for name in self.names(reads)}
            shares = [rows_of(needed, place) for place in self.places()]
            calls = zip(self.ranks, shares, strict=True)
            parts = ray.get([rank.compute.remote(share, writes) for rank, share in calls])
            self.sent["driver"] += sum(_bytes(column) for share in shares for column in share.values())
            if writes:
                columns[writes] = joined(parts)
                self.sent["driver"] += _bytes(columns[writes])
        self.tensors = sum(_bytes(column) for column in columns.values())


@dataclass(frozen=True)
class Computation:
    """What a small model costs on one thread: seconds per token of a forward and of an update."""

    parameters: int
    forward_s: float
    update_s: float

    def of_step(self, num_tokens: int) -> float:
        """Old log-probabilities, reference and values are forwards; the ranks work side by side."""
        return num_tokens * (3 * self.forward_s + self.update_s) / RANKS


def measure_computation(repeats: int, rows: int = 2, length: int = 2048) -> Computation:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder), hidden_size=64, num_layers=2, num_heads=2)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(0, 256, (rows, length))

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=tokens)

    def update() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    timings = interleaved({"forward": forward, "update": update}, repeats=repeats, warmups=1)
    return Computation(model.num_parameters(), *(timings[name].wall / tokens.numel() for name in ("forward", "update")))


def _size(batch: BatchMeta) -> int:
    return len(pickle.dumps(batch))


def _bytes(column: Tensor) -> int:
    return (column.values() if column.is_nested else column).nbytes


def num_tokens(num_rows: int, has_images: bool) -> int:
    return len(made(num_rows, has_images)["bench_tokens"].values())


def step_rows(title: str, bench: StepBench, timings: dict[str, Timing], computed: float) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for name, each in timings.items():
        saved = timings["driver"].wall - timings["queue"].wall if name == "queue" else 0.0
        less = [f"{100 * saved / (timings['driver'].wall + added):.0f} %" if saved else "" for added in (0.0, computed)]
        share = f"{100 * bench.sent[name] / bench.tensors:.2f} %"
        rows.append([title, name, bench.tensors / 2**20, each.wall, each.cpu, share, less[0], computed, less[1]])
    return rows


def measure_step(repeats: int) -> dict[str, Any]:
    declare_columns()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    queue = Queue.create("simple", budget_bytes=2 << 30, timeout_s=120)
    start = ray.remote(Worker).options(num_cpus=0)
    workers: list[Any] = [start.remote(queue) for _ in range(1 + RANKS)]
    sampler, *ranks = workers
    computation = measure_computation(repeats)
    rows, figures = [], {}
    for title, (num_rows, has_images) in PAYLOADS.items():
        ray.get(sampler.prepare.remote(num_rows, has_images))
        bench = StepBench(queue, sampler, ranks, num_rows, has_images)
        timings = interleaved(
            {"queue": bench.through_queue, "driver": bench.through_driver}, repeats=repeats, warmups=2
        )
        computed = computation.of_step(num_tokens(num_rows, has_images))
        rows += step_rows(title, bench, timings, computed)
        figures[title] = {
            "wall_s": {name: each.wall for name, each in timings.items()},
            "bytes_through_driver": bench.sent,
            "tensor_bytes": bench.tensors,
            "computed_s": computed,
        }
    title = f"The data of a step; a model of {computation.parameters / 1e6:.1f}M parameters would compute"
    header = ["payload", "tensors go by", "MiB", "seconds", "CPU-s", "of it through the driver", "less time",
              "computation, s", "less time of a whole step"]  # fmt: skip
    publish("agents-step", title, header, rows, figures)
    queue.close()
    ray.shutdown()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=["turns", "step"], default=["turns", "step"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if "turns" in options.parts:
        measure_turns(options.repeats)
    if "step" in options.parts:
        measure_step(options.repeats)


if __name__ == "__main__":
    main()
