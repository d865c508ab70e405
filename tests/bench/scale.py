"""A 7B step on 8, 32 and 128 GPUs, planned from counted FLOPs and bytes; and the driver's own cost, measured.

    make bench-scale

No GPU is needed, and none is measured: the first table says what a step would take on the hardware of `GPU`, if the
shares of its peaks in `REACHED` are reached. The formulas, with A active parameters, N all, E bytes of a number (2), L
layers, h hidden size, T tokens of all rows, G GPUs:

    prefill      2·A·(prompt tokens, once per group) / (G·FLOPs)
    decode       steps · (E·N + E·cache·running·mean length) / HBM of one GPU, an engine per GPU
    log-probs    (2·A·T + 2·L·h·Σ length²) / (G·FLOPs)
    update       4 times that (forward, recomputed forward, twice as much backward), or FSDP's traffic if that takes
                 longer: two gathers of E·N and one reduction of 4·N bytes for each micro-batch, over NVLink in one
                 node, over the network between nodes
    optimizer    28·N/G bytes / HBM, for each update
    sync         E·N gathered once and sent to every node, then read by each engine

The second table is measured: rows of a step put by 64 writers into the index, waited for, ordered, spread over the
ranks, looked up by each rank and cleared, in one process without Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "110")

import torch
from harness import cpu_seconds, publish, show

from tqppo.algorithms import balance
from tqppo.config.plan.model_shape import ModelShape
from tqppo.config.plan.shapes import shape_of
from tqppo.queue.client import BatchMeta, Queue

MODEL = "Qwen/Qwen2.5-7B-Instruct"
GPUS, ROWS = (8, 32, 128), (16_384, 100_000)
NUM_BYTES = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """Peaks of one GPU of an H100 node, per second, by its data sheet."""

    flops: float = 989e12  # bfloat16, dense
    memory: float = 3.35e12
    nvlink: float = 450e9  # one direction
    network: float = 50e9  # 400 Gbit/s for each GPU
    per_node: int = 8


GPU = Hardware()
REACHED = {"flops": 0.4, "memory": 0.6, "links": 0.7}  # shares of the peaks, of well-tuned programs as published


@dataclass(frozen=True)
class Work:
    """One step. Lengths are means; attention counts every row at its mean length."""

    prompts: int = 512
    group: int = 16
    prompt_tokens: int = 256
    response_tokens: int = 1024
    longest: int = 2048  # the step waits for the longest answer
    updates: int = 16
    micro_batch_tokens: int = 16_384
    running: int = 256  # rows that an engine decodes at once

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def active_parameters(shape: ModelShape) -> int:
    """Weights that compute one token: all of a dense model, without the embedding, which is a look-up."""
    dense, router = (shape.experts.dense_layers, shape.experts.count * shape.hidden) if shape.experts else (0, 0)
    layer = shape.attention_parameters + 3 * shape.hidden * shape.active_intermediate + router
    head = shape.vocabulary * shape.hidden
    return head + (shape.layers - dense) * layer + dense * shape.dense_layer_parameters


def forward_flops(shape: ModelShape, work: Work) -> float:
    attention = 2 * shape.layers * shape.heads * shape.head_size * work.rows * work.length**2
    return 2 * active_parameters(shape) * work.tokens + attention


def planned(shape: ModelShape, work: Work, gpus: int) -> dict[str, float]:
    """Seconds of each stage."""
    compute = gpus * GPU.flops * REACHED["flops"]
    memory = GPU.memory * REACHED["memory"]
    forward = forward_flops(shape, work) / compute
    update = max(4 * forward, fsdp_traffic_s(shape, work, gpus))
    return {
        "prefill": 2 * active_parameters(shape) * work.prompts * work.prompt_tokens / compute,
        "decode": decode_s(shape, work, gpus, memory),
        "old log-probs": forward,
        "update": update,
        "optimizer": work.updates * 28 * shape.parameters / gpus / memory,
        "sync": sync_s(shape, gpus, memory),
    }


def decode_s(shape: ModelShape, work: Work, gpus: int, memory: float) -> float:
    """Each decoding step reads all weights and the cache of the running rows. Rows beyond `running` wait their turn."""
    per_engine = work.rows / gpus
    running = min(work.running, per_engine)
    steps = max(work.longest, per_engine * work.response_tokens / running)
    cache = shape.cached_numbers * NUM_BYTES * running * (work.prompt_tokens + work.response_tokens / 2)
    return steps * (NUM_BYTES * shape.parameters + cache) / memory


def link(gpus: int) -> float:
    """Bytes per second that one GPU receives in a collective of so many."""
    return (GPU.nvlink if gpus <= GPU.per_node else GPU.network) * REACHED["links"]


def fsdp_traffic_s(shape: ModelShape, work: Work, gpus: int) -> float:
    micro_batches = max(work.updates, work.tokens / gpus / work.micro_batch_tokens)
    per_micro_batch = (2 * NUM_BYTES + 4) * shape.parameters * (gpus - 1) / gpus
    return micro_batches * per_micro_batch / link(gpus)


def sync_s(shape: ModelShape, gpus: int, memory: float) -> float:
    weights = NUM_BYTES * shape.parameters
    return weights / link(gpus) + weights / memory


# -- the driver and the index ------------------------------------------------------------------------------------------


def driver_cost(rows: int, ranks: int, writers: int = 64) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of each thing that is done once for all rows of a step."""
    queue = Queue.create("simple", budget_bytes=8 << 30, local=True)
    keys = [f"p{i // 16:06d}_{i % 16}_0" for i in range(rows)]
    lengths = torch.randint(300, 2300, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    found: dict[str, tuple[float, float]] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        cpu, wall = cpu_seconds(), time.perf_counter()
        result = call()
        found[name] = (time.perf_counter() - wall, cpu_seconds() - cpu)
        return result

    def put() -> None:
        size = max(1, rows // writers // 16)
        for begin in range(0, rows, size):
            part = slice(begin, min(begin + size, rows))
            tags = [
                {
                    "status": "finished",
                    "uid": key[:7],
                    "session": i % 16,
                    "trajectory": 0,
                    "order": i,
                    "seq_len": length,
                }
                for i, (key, length) in enumerate(zip(keys[part], lengths[part], strict=True), begin)
            ]
            queue.put(keys[part], {"reward": torch.zeros(len(keys[part]))}, tags=tags)

    timed("put", put)
    batch = timed("wait", lambda: queue.wait(keys, timeout_s=60.0))
    batch = timed("order", batch.in_order)
    costs = [float(balance.workload(length)) for length in lengths]
    parts = timed("spread", lambda: balance.partition(costs[: rows - rows % ranks], ranks))
    shares: list[BatchMeta] = timed("cut", lambda: [batch.take(part) for part in parts])
    timed("look up", lambda: [queue.get(share, ["reward"]) for share in shares])
    timed("clear", lambda: queue.clear(batch))
    queue.close()
    return found


def main() -> None:
    shape = shape_of(MODEL)
    assert shape is not None
    work = Work()
    plans = {gpus: planned(shape, work, gpus) for gpus in GPUS}
    stages = [*plans[GPUS[0]], "total"]
    rows = [[stage, *(sum(p.values()) if stage == "total" else p[stage] for p in plans.values())] for stage in stages]
    first = sum(plans[GPUS[0]].values()) * GPUS[0]
    rows.append(["share of linear", *(first / gpus / sum(plans[gpus].values()) for gpus in GPUS)])
    title = f"planned seconds of a step: {MODEL}, {work.rows:,} rows, {work.tokens / 1e6:.1f}M tokens"
    show(title, ["stage", *(f"{gpus} GPUs" for gpus in GPUS)], rows)
    measured = {count: driver_cost(count, ranks=128) for count in ROWS}
    header = [
        "driver and index, 128 ranks",
        *(f"{count:,} rows: {what}" for count in ROWS for what in ("wall s", "CPU s")),
    ]
    table = [[name, *(second for count in ROWS for second in measured[count][name])] for name in measured[ROWS[0]]]
    table.append(["total", *(sum(each[i] for each in measured[count].values()) for count in ROWS for i in (0, 1))])
    figures = {"planned": plans, "measured": {str(count): each for count, each in measured.items()}}
    publish("scale", "measured, one process", header, table, figures)


if __name__ == "__main__":
    main()
