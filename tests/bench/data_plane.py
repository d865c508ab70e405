"""The queue against TransferQueue, a driver that carries the data, and memcpy, interleaved in one run.

    make bench-queue                                # everything
    python tests/bench/data_plane.py --parts text256 rows --subjects simple peer

Parts: text64, text256, text1024, images64, rows, columns. Two subjects are `simple` without one of its optimisations,
and a second table shows what each of those buys: "over ray" makes every call to the index a Ray call instead of using
the local socket (queue/link/wire.py), "remapped" maps a block again for every read instead of keeping mappings
(backends/storage/mappings.py). (The file cannot be called queue.py, because run from this folder it would shadow
Python's module of that name.)
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("COLUMNS", "100")  # of a terminal that does not say: the table is wider than the usual 80

import numpy as np
import ray
import torch
from harness import Timing, cpu_seconds, interleaved, publish, show
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from tqppo.columns import Column, Kind, declare
from tqppo.queue.client import BatchMeta, Queue
from tqppo.queue.link.calls import run

Payload = dict[str, Tensor]

RAGGED = {
    "bench_ids": torch.int64, "bench_positions": torch.int64, "bench_mask": torch.bool, "bench_old": torch.float32,
    "bench_ref": torch.float32, "bench_values": torch.float32, "bench_advantages": torch.float32,
}  # fmt: skip
REWARD, IMAGE = "bench_reward", "bench_image"
TWO = ["bench_ids", "bench_advantages"]  # of "two columns", on every payload
SIZES = {"text64": (64, False), "text256": (256, False), "text1024": (1024, False), "images64": (64, True)}
ROWS = (64, 256, 1024, 4096, 16384)
COLUMNS = (2, 4, 8, 16, 32)
SMALL_ROW = (16, 64)  # tokens
STORE_BYTES = 1 << 30  # of Ray's objects
PEER_ROWS = 4096  # TransferQueue needs half a minute for more

# operation → part → how many times less than TransferQueue: CPU-seconds for the cycle, wall for the rest
TARGETS: dict[str, dict[str, tuple[float, float, float]]] = {
    "simple": {"cycle": (15, 25, 10), "half": (4, 5, 3), "two columns": (10, 20, 8), "2 consumers": (8, 20, 8)},
    "ray": {"cycle": (8, 15, 8)},
}
TARGET_PARTS = ("text256", "text1024", "images64")


# -- payloads --------------------------------------------------------------------------------------------------------


def declare_columns() -> None:
    for name, dtype in RAGGED.items():
        declare(Column(name, Kind.RAGGED, str(dtype).removeprefix("torch.")))
    declare(Column(REWARD, Kind.ROW, "float32"))
    declare(Column(IMAGE, Kind.ROW, "float32", trailing=(None, None, None)))
    for i in range(max(COLUMNS)):
        declare(Column(f"bench_{i}", Kind.RAGGED, "float32"))


def values(dtype: torch.dtype, count: int) -> Tensor:
    if dtype is torch.int64:
        return torch.arange(count)
    return torch.rand(count) if dtype is torch.float32 else torch.ones(count, dtype=dtype)


def ragged(names: dict[str, torch.dtype], rows: int, tokens: tuple[int, int]) -> Payload:
    lengths = torch.randint(tokens[0], tokens[1] + 1, (rows,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {
        name: torch.nested.nested_tensor_from_jagged(values(dtype, int(offsets[-1])), offsets)
        for name, dtype in names.items()
    }


def payload(part: str) -> Payload:
    rows, has_images = SIZES[part]
    made = {**ragged(RAGGED, rows, (512, 4096)), REWARD: torch.rand(rows)}
    return {**made, IMAGE: torch.rand(rows, 3, 448, 448)} if has_images else made


def flat(tensor: Tensor) -> Tensor:
    """The values of a jagged tensor, by attribute, because its methods cost more than reading a small column."""
    return tensor._values if isinstance(tensor, NestedTensor) else tensor


def size(data: Payload) -> int:
    return sum(flat(tensor).nbytes for tensor in data.values())


def touch(data: dict[str, Any]) -> None:
    """Read every byte."""
    for tensor in data.values():
        plain = flat(tensor)
        for each in plain.unbind() if plain.is_nested else [plain]:  # nested the old, strided way
            memory = each.contiguous().view(-1).view(torch.uint8)
            memory[: memory.numel() // 8 * 8].view(torch.int64).sum()


# -- subjects --------------------------------------------------------------------------------------------------------


class Ours:
    """The queue over one of its storages. Sent to an actor, it connects there."""

    def __init__(self, storage: str) -> None:
        self.queue = Queue.create(storage, budget_bytes=2 << 30, timeout_s=120)

    def connected(self) -> Queue:
        return self.queue

    def put(self, keys: list[str], data: Payload) -> BatchMeta:
        return self.connected().put(keys, data)

    def get(self, batch: BatchMeta, columns: list[str]) -> dict[str, Any]:
        return self.connected().get(batch, columns)

    def rows(self, batch: BatchMeta, places: Sequence[int]) -> BatchMeta:
        return batch.take(places)

    def clear(self, batch: BatchMeta) -> None:
        self.connected().clear(batch)

    def close(self) -> None:
        self.queue.close()


class OverRay(Ours):
    """`simple` without the local socket."""

    def connected(self) -> Queue:
        self.queue.aio.connection.link._is_near = False  # type: ignore[attr-defined]
        return self.queue


class Remapped(Ours):
    """`simple` without kept mappings for readers."""

    def connected(self) -> Queue:
        storage: Any = run(self.queue.aio.connection.storage())
        files = storage._here()
        if not hasattr(files._read, "keeps_nothing"):
            files._read = self._fresh_mappings()
        return self.queue

    @staticmethod
    def _fresh_mappings() -> Any:
        mappings = importlib.import_module("tqppo_backends.storage.mappings")

        class FreshMappings(mappings.IdleFiles):  # type: ignore[misc,name-defined]
            keeps_nothing = True

            def _return(self, file: Any, address: int, used: Any) -> None:
                file.memory = None
                self.take_back(file)

        return FreshMappings()


class Peer:
    """TransferQueue with its SimpleStorage and default settings."""

    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()

    def put(self, keys: list[str], data: Payload) -> list[str]:
        import transfer_queue
        from tensordict import TensorDict

        transfer_queue.kv_batch_put(keys, "train", TensorDict(dict(data), batch_size=len(keys)))
        return keys

    def get(self, keys: list[str], columns: list[str]) -> dict[str, Any]:
        import transfer_queue

        found = transfer_queue.kv_batch_get(keys, "train", columns)
        return {name: found[name] for name in columns}

    def rows(self, keys: list[str], places: Sequence[int]) -> list[str]:
        return [keys[i] for i in places]

    def clear(self, keys: list[str]) -> None:
        import transfer_queue

        transfer_queue.kv_clear(keys, "train")

    def close(self) -> None:
        import transfer_queue

        transfer_queue.close()


SUBJECTS: dict[str, Callable[[], Any]] = {
    "peer": Peer,
    "simple": lambda: Ours("simple"),
    "ray": lambda: Ours("ray"),
    "over ray": lambda: OverRay("simple"),
    "remapped": lambda: Remapped("simple"),
}
WITHOUT = {"over ray": "local socket", "remapped": "kept mappings"}  # subject → the optimisation of `simple` it lacks


def repeated(count: int) -> dict[str, int]:
    """How often an operation is repeated per measurement: once for the peer, which is slow."""
    return dict.fromkeys([*SUBJECTS, "memcpy"], count) | {"peer": 1}


def wear_in() -> None:
    """Touch Ray's memory once, as the first steps of a run do, because the first use of a page costs more than the
    copy into it. A quarter stays untouched, or Ray would spill to disk."""
    piece = np.ones(64 << 20, np.uint8)
    held = [ray.put(piece) for _ in range(3 * STORE_BYTES // 4 // piece.nbytes)]
    del held
    time.sleep(1)


def names(rows: int) -> list[str]:
    return [f"u{i}_0_0" for i in range(rows)]


@ray.remote(num_cpus=0)
class Producer:
    """Holds a payload, as a rollout worker holds its trajectories."""

    def __init__(self, subjects: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.subjects = subjects

    def wear_in(self) -> None:
        wear_in()

    def load(self, part: str) -> None:
        self.data, self.keys = payload(part), names(SIZES[part][0])

    def put(self, subject: str) -> Any:
        return self.subjects[subject].put(self.keys, self.data)

    def hand_over(self) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """The batch in the form that is cheapest for Ray: plain arrays, and the lengths of ragged rows."""
        return {
            name: (flat(t).numpy(), cast(NestedTensor, t).offsets().diff().numpy() if t.is_nested else None)
            for name, t in self.data.items()
        }  # fmt: skip


@ray.remote(num_cpus=0)
class Consumer:
    def __init__(self, subjects: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.subjects = subjects

    def get(self, subject: str, rows: Any, columns: list[str]) -> None:
        touch(self.subjects[subject].get(rows, columns))

    def take(self, data: dict[str, tuple[np.ndarray, np.ndarray | None]]) -> None:
        for array, _ in data.values():
            plain = array.reshape(-1).view(np.uint8)
            plain[: plain.nbytes // 8 * 8].view(np.int64).sum()


# -- operations ------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    subjects: dict[str, Any]
    repeats: int
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producer = Producer.remote(self.subjects)  # type: ignore[attr-defined]
        wear_in()
        ray.get(self.producer.wear_in.remote())
        self.consumers = [Consumer.remote(self.subjects) for _ in range(2)]  # type: ignore[attr-defined]

    def run(self, part: str) -> None:
        """All operations on one payload."""
        data, keys = payload(part), names(SIZES[part][0])
        ray.get(self.producer.load.remote(part))
        self.record(part, "cycle", self.cycle(data, keys, counts=repeated(8)))
        batches = {name: subject.put(keys, data) for name, subject in self.subjects.items()}
        self.record(part, "half", self.halves(batches, data))
        self.record(part, "two columns", self.two_columns(batches, TWO))
        if IMAGE in data:
            self.record(part, "ids and images", self.two_columns(batches, [TWO[0], IMAGE]))
        for name, subject in self.subjects.items():
            subject.clear(batches[name])
        self.record(part, "2 consumers", self.fan_out(data))
        if part == "text256":
            self.record(part, "one row", self.single_rows(data))

    def cycle(self, data: Payload, keys: list[str], *, counts: dict[str, int], repeats: int = 0) -> dict[str, Timing]:
        """put + get + touch + clear, repeated where one is shorter than the tick of the CPU clock."""

        def of(subject: Any) -> Callable[[], None]:
            def work() -> None:
                batch = subject.put(keys, data)
                touch(subject.get(batch, list(data)))
                subject.clear(batch)

            return work

        runs = {name: of(subject) for name, subject in self.subjects.items()}
        runs["memcpy"] = memcpy(data)
        return self.measure(runs, counts, repeats=repeats)

    def halves(self, batches: dict[str, Any], data: Payload) -> dict[str, Timing]:
        """A random half of the keys, a new one every time."""
        rows, random = len(data[REWARD]), np.random.default_rng(0)
        choices = [random.permutation(rows)[: rows // 2].tolist() for _ in range(64)]

        def of(name: str, subject: Any) -> Callable[[], None]:
            turn = iter(range(10**6))

            def work() -> None:
                chosen = subject.rows(batches[name], choices[next(turn) % len(choices)])
                touch(subject.get(chosen, list(data)))

            return work

        return self.measure({n: of(n, s) for n, s in self.subjects.items()}, repeated(4))

    def two_columns(self, batches: dict[str, Any], columns: list[str]) -> dict[str, Timing]:
        def of(name: str, subject: Any) -> Callable[[], None]:
            return lambda: touch(subject.get(batches[name], columns))

        return self.measure({n: of(n, s) for n, s in self.subjects.items()}, repeated(8))

    def fan_out(self, data: Payload) -> dict[str, Timing]:
        """One worker makes the batch, two others read half of it each; "driver" sends it through the driver instead."""
        columns, rows = list(data), len(data[REWARD])
        parts = [range(rows // 2), range(rows // 2, rows)]
        made: dict[str, Any] = {}

        def of(name: str, subject: Any) -> Callable[[], None]:
            def work() -> None:
                batch = made[name] = ray.get(self.producer.put.remote(name))
                halves = [subject.rows(batch, part) for part in parts]
                pairs = zip(self.consumers, halves, strict=True)
                ray.get([consumer.get.remote(name, half, columns) for consumer, half in pairs])

            return work

        def driver() -> None:
            batch = ray.get(self.producer.hand_over.remote())
            halves = [cut(batch, part) for part in parts]
            ray.get([c.take.remote(half) for c, half in zip(self.consumers, halves, strict=True)])

        def clear(name: str) -> None:
            if name in made:
                self.subjects[name].clear(made.pop(name))

        runs = {n: of(n, s) for n, s in self.subjects.items()}
        return interleaved({**runs, "driver": driver, "memcpy": memcpy(data)}, repeats=self.repeats, after=clear)

    def single_rows(self, data: Payload) -> dict[str, Timing]:
        """Trajectories put one by one, as rollouts finish."""
        rows = {name: torch.nested.nested_tensor([t.unbind()[0]], layout=torch.jagged)
                for name, t in data.items() if t.is_nested}  # fmt: skip

        def of(subject: Any) -> Callable[[], None]:
            return lambda: subject.clear(subject.put(["single_0_0"], rows))

        runs = {n: of(s) for n, s in self.subjects.items()}
        return self.measure(runs, dict.fromkeys(runs, 16))

    def growth(self, part: str) -> None:
        """The cycle on small rows, over growing numbers of rows or of columns."""
        for count in ROWS if part == "rows" else COLUMNS:
            columns, rows = (8, count) if part == "rows" else (count, 256)
            data = ragged({f"bench_{i}": torch.float32 for i in range(columns)}, rows, SMALL_ROW)
            peer = self.subjects.pop("peer", None) if rows > PEER_ROWS else None
            timings = self.cycle(data, names(rows), counts=repeated(8), repeats=min(3, self.repeats))
            self.record(part, f"{count}", timings, megabytes=size(data) / 1e6)
            if peer is not None:
                self.subjects["peer"] = peer

    def measure(
        self, runs: dict[str, Callable[[], None]], counts: dict[str, int], *, repeats: int = 0
    ) -> dict[str, Timing]:
        many = {name: times(counts.get(name, 1), work) for name, work in runs.items()}
        timings = interleaved(many, repeats=repeats or self.repeats)
        for name, timing in timings.items():
            timing.wall_s = [each / counts.get(name, 1) for each in timing.wall_s]
            timing.cpu_s = [each / counts.get(name, 1) for each in timing.cpu_s]
        return timings

    def record(self, part: str, operation: str, timings: dict[str, Timing], **more: float) -> None:
        found = {name: {"cpu_ms": 1e3 * t.cpu, "wall_ms": 1e3 * t.wall} for name, t in timings.items()}
        peer = found.get("peer")
        for name, figures in found.items():
            if peer is not None and name != "peer":
                figures["cpu_ratio"] = peer["cpu_ms"] / max(figures["cpu_ms"], 1e-3)
                figures["wall_ratio"] = peer["wall_ms"] / figures["wall_ms"]
            if "megabytes" in more:
                figures["cpu_ms_per_mb"] = figures["cpu_ms"] / more["megabytes"]
            target = TARGETS.get(name, {}).get(operation)
            if target is not None and part in TARGET_PARTS:
                figures["target"] = target[TARGET_PARTS.index(part)]
        self.figures.setdefault(part, {})[operation] = found
        print(f"{part}, {operation}: " + ", ".join(f"{n} {f['wall_ms']:.1f} ms" for n, f in found.items()), flush=True)


def cut(batch: dict[str, tuple[np.ndarray, np.ndarray | None]], rows: range) -> dict[str, Any]:
    """Some consecutive rows of a batch of plain arrays, without a copy."""
    found = {}
    for name, (array, lengths) in batch.items():
        start, stop = rows.start, rows.stop
        if lengths is not None:
            start, stop = int(lengths[:start].sum()), int(lengths[:stop].sum())
        found[name] = (array[start:stop], None if lengths is None else lengths[rows.start : rows.stop])
    return found


def memcpy(data: Payload) -> Callable[[], None]:
    """The lower bound: copy every byte once into reused memory, and read it."""
    copies = {name: torch.empty_like(flat(tensor)) for name, tensor in data.items()}

    def work() -> None:
        for name, tensor in data.items():
            copies[name].copy_(flat(tensor))
        touch(copies)

    return work


def times(count: int, work: Callable[[], None]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


# -- the run ---------------------------------------------------------------------------------------------------------


def idle_cpu(seconds: float = 2.0) -> float:
    """CPU-seconds per second that the processes use while they are idle, which is part of every figure."""
    before = cpu_seconds()
    time.sleep(seconds)
    return (cpu_seconds() - before) / seconds


def table(figures: dict[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for part, operations in figures.items():
        for operation, found in operations.items():
            for name, f in found.items():
                ratio = "cpu_ratio" if operation == "cycle" else "wall_ratio"
                met = (
                    "" if "target" not in f else f"≥ {f['target']:g}" + ("" if f.get(ratio, 0) >= f["target"] else " ✗")
                )
                cells = [f.get("cpu_ratio", ""), f.get("wall_ratio", ""), met, f.get("cpu_ms_per_mb", "")]
                rows.append([f"{part}: {operation}", name, f["cpu_ms"], f["wall_ms"], *cells])
    return rows


def show_gains(figures: dict[str, Any]) -> None:
    """What each optimisation of `simple` buys: the wall time (and CPU time) without it, over that with it."""
    rows: list[list[Any]] = []
    for part, operations in figures.items():
        for operation, found in operations.items():
            if "simple" in found:
                gains = [gain(found.get(subject), found["simple"]) for subject in WITHOUT]
                rows.append([f"{part}: {operation}", *gains])
    show("`simple` without one optimisation, ÷ with it: wall (CPU)", ["payload: operation", *WITHOUT.values()], rows)


def gain(without: dict[str, float] | None, simple: dict[str, float]) -> str:
    if without is None:
        return ""
    wall, cpu = without["wall_ms"] / simple["wall_ms"], without["cpu_ms"] / max(simple["cpu_ms"], 1e-3)
    return f"{wall:.2f} ({cpu:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=[*SIZES, "rows", "columns"], choices=[*SIZES, "rows", "columns"])
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    declare_columns()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
    subjects = {name: SUBJECTS[name]() for name in asked.subjects}
    bench = Bench(subjects, asked.repeats)
    for part in asked.parts:
        bench.run(part) if part in SIZES else bench.growth(part)
    idle = idle_cpu()
    for subject in subjects.values():
        subject.close()
    ray.shutdown()
    header = ["payload: operation", "by", "CPU ms", "wall ms", "CPU ×", "wall ×", "target", "CPU ms/MB"]
    title = (
        f"The queue against TransferQueue (× = its cost / ours); idle processes use {1000 * idle:.0f} ms of CPU per s"
    )
    show_gains(bench.figures)
    publish("queue", title, header, table(bench.figures), {"idle_cpu_per_s": idle, "parts": bench.figures})


if __name__ == "__main__":
    main()
