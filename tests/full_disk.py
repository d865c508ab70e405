"""Everything that a run writes, on file systems that are full. `test_full_disk` runs this in its own mount namespace.

Each function gets an empty file system of 1 MiB and a folder with room. It makes the disk full, writes, and checks the
error and what is left; most of them then make room and write again.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tqppo.errors import OutOfSpace
from tqppo.run.checkpoint import SaveParts
from tqppo.space import Digest

MIB = 1 << 20
WRITERS: dict[str, Callable[[Path, Path], object]] = {}
Writer = Callable[[Path, Path], object]


def writer(function: Writer) -> Writer:
    WRITERS[function.__name__] = function
    return function


def fill(disk: Path) -> Path:
    """Leave no byte free; returns the file to delete to have room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """The block must fail because the disk of `folder` is full, and say so with the figures."""
    with pytest.raises(OutOfSpace, match=f"{folder}.*has no room for .*No space left on device; .* bytes are free"):
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "filler")


# -- the run's own files -----------------------------------------------------------------------------------------------


@writer
def metrics(disk: Path, big: Path) -> None:
    from tqppo.metrics import files

    log = files.MetricsLog(disk / "metrics.jsonl")
    log.write(1, {})
    before, filler = (disk / "metrics.jsonl").read_bytes(), fill(disk)
    values = {f"metric/{i}": 1.0 for i in range(1000)}  # more than what is left of the file's last page
    for step in (2, 3):
        with refused(disk):
            log.write(step, values)
    assert (disk / "metrics.jsonl").read_bytes() == before
    filler.unlink()
    log.write(4, {})
    assert [line["step"] for line in files.read(disk / "metrics.jsonl")] == [1, 2, 3, 4]


@writer
def metrics_on_resume(disk: Path, big: Path) -> None:
    """A cut that finds no room leaves the file as it was."""
    from tqppo.metrics import files

    log = files.MetricsLog(disk / "metrics.jsonl")
    for step in range(1, 5):
        log.write(step, {})
    before, filler = (disk / "metrics.jsonl").read_bytes(), fill(disk)
    with refused(disk):
        files.cut(disk / "metrics.jsonl", 3)
    assert (disk / "metrics.jsonl").read_bytes() == before
    assert names(disk) == ["metrics.jsonl"]
    filler.unlink()
    assert files.cut(disk / "metrics.jsonl", 3) == []


@writer
def events(disk: Path, big: Path) -> None:
    from tqppo.metrics.files import EventLog

    log, filler = EventLog(disk / "events.jsonl"), fill(disk)
    for _ in range(3):
        log.write("warning", message="the disk is full")  # does not end the run
    filler.unlink()
    log.write("end")
    found = [json.loads(line)["event"] for line in (disk / "events.jsonl").read_text().splitlines()]
    assert found == ["warning"] * 3 + ["end"]


@writer
def config(disk: Path, big: Path) -> None:
    from tqppo import space

    space.write_whole(disk / "config.resolved.toml", b"lr = 1e-3\n")
    fill(disk)
    with refused(disk):
        space.write_whole(disk / "config.resolved.toml", b"lr = 1e-6\n" * 1000)
    assert (disk / "config.resolved.toml").read_bytes() == b"lr = 1e-3\n"
    assert names(disk) == ["config.resolved.toml"]


@writer
def lock(disk: Path, big: Path) -> None:
    from tqppo.run.lock import RunLock

    filler = fill(disk)
    with refused(disk), RunLock(disk):
        pass
    filler.unlink()
    with RunLock(disk):
        pass


@writer
def logs_of_workers(disk: Path, big: Path) -> None:
    from tqppo.run.cluster import _keep_logs

    printed = big / "session_2026" / "logs" / "worker-1.out"
    printed.parent.mkdir(parents=True)
    printed.write_bytes(bytes(2 * MIB))
    _keep_logs(big, disk)
    assert names(disk) == []  # half of it would take the room that the last metrics need


@writer
def tensorboard(disk: Path, big: Path) -> None:
    import threading

    from tqppo.metrics import trackers

    threading.excepthook = lambda _: None  # of TensorBoard's own thread, which ends
    board = trackers.load(["tensorboard"], disk)
    board.log(1, {"actor/kl": 1.0})
    filler = fill(disk)
    for step in (2, 3):
        with refused(disk):
            for _ in range(100):  # until the last page of its file is full
                board.log(step, {f"metric/{i}": 1.0 for i in range(100)})
    filler.unlink()
    board.log(4, {"actor/kl": 4.0})
    board.close()


# -- checkpoints and exports -------------------------------------------------------------------------------------------


@writer
def checkpoint(disk: Path, big: Path) -> None:
    from tqppo.run.checkpoint import CheckpointStore

    store = CheckpointStore(disk / "checkpoints")
    store.write(3, model_of(MIB // 2), {})
    with refused(disk):
        store.write(6, model_of(MIB), {})
    with refused(disk):
        store.write(6, model_of(MIB), {}, num_bytes=MIB)  # is not begun
    fill(disk)
    with refused(disk):
        store.write(6, model_of(1), {})
    assert store.newest().step == 3
    assert names(store.folder) == ["latest", "step_000003"]


def model_of(num_bytes: int) -> SaveParts:
    def save(folder: Path) -> dict[str, Digest]:
        (folder / "model").write_bytes(bytes(num_bytes))
        return {}

    return save


@writer
def learner(disk: Path, big: Path) -> None:
    """A rank that finds the disk full says so, and lives on."""
    import torch

    from tqppo.weights.file import Entry
    from tqppo.weights.parts import TensorFile
    from tqppo.workers.compute.saving import LearnerPart

    tensors = TensorFile("model.safetensors", [Entry.of("w", torch.ones(MIB))])
    part = LearnerPart([tensors], {"state.json": b"{}"})
    assert f"{disk} has no room for 41" in part.try_write(str(disk)).problem
    fill(disk)
    assert f"{disk} has no room for" in part.try_write(str(disk)).problem


@writer
def export(disk: Path, big: Path) -> None:
    import torch

    from tqppo.weights import publish

    model = tiny_model(big)
    for folder in (disk / "one", disk / "two"):
        folder.mkdir()
        with refused(disk):
            publish.export(folder, publish.entries(model, torch.float32))
        fill(disk)
        with refused(disk):
            publish.save_description(model, str(big / "model"), folder, torch.float32)


@writer
def fork(disk: Path, big: Path) -> None:
    from tqppo.run import start
    from tqppo.run.checkpoint import CheckpointStore
    from tqppo.run.folder import RunFolder, new_run

    run = RunFolder(big / "mine")
    run.path.mkdir()
    run.config.write_text("")
    store = CheckpointStore(run.checkpoints, run_files=run.files_of_resume)
    store.write(3, model_of(2 * MIB), {})
    forked = new_run(disk, "other", preset="", model="")
    with refused(forked.path):
        start.copy_run(run, forked, store.newest())
    assert names(disk) == []


@writer
def tiny_model_of_a_run(disk: Path, big: Path) -> None:
    from tqppo.tiny.model import write_tiny_model

    with refused(disk):
        write_tiny_model(disk / "model", hidden_size=128)


def tiny_model(big: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from tqppo.tiny.model import write_tiny_model

    return AutoModelForCausalLM.from_pretrained(write_tiny_model(big / "model", hidden_size=128))


# -- the data plane ----------------------------------------------------------------------------------------------------


@writer
def tensor_file(disk: Path, big: Path) -> None:
    """Without room a mapped file would be SIGBUS."""
    import torch

    from tqppo.weights import file
    from tqppo.weights.file import Entry

    with refused(disk):
        file.write(disk / "x.safetensors", [Entry.of("w", torch.ones(MIB))])
    assert (disk / "x.safetensors").stat().st_size == 0
    file.write(disk / "x.safetensors", [Entry.of("w", torch.ones(MIB // 8))])  # what fits is written afterwards
    assert float(file.MappedFile.open(disk / "x.safetensors").tensor("w").sum()) == MIB // 8


@writer
def published_weights(disk: Path, big: Path) -> None:
    import torch

    from tqppo.weights.publish import Publisher

    publisher, model = Publisher(str(disk / "published"), str(big / "model")), tiny_model(big)
    for _ in range(2):
        with refused(disk):
            publisher.publish(model, torch.float32, 1, is_writer=True)
    publisher.close()
    assert names(disk) == []


@writer
def copied_weights(disk: Path, big: Path) -> None:
    import torch

    from tqppo.processes.reaper import claim
    from tqppo.protocols import WeightSource
    from tqppo.weights import copy
    from tqppo.weights.publish import Publisher
    from tqppo.weights.send import Sender, SenderClient

    model = tiny_model(big)
    source = Publisher(str(big / "published"), str(big / "model")).publish(model, torch.float32, 1, is_writer=True)
    copies, client = copy.Copies(), SenderClient(Sender())
    copies._claim = claim(disk / "copies")
    for _ in range(2):
        with refused(disk):
            asyncio.run(copies.fetch(WeightSource(source.folder, 1, "elsewhere", client), client))
    copies.close()
    assert names(disk) == []


@writer
def queue_snapshot(disk: Path, big: Path) -> None:
    import torch

    from tqppo.columns import Column, Kind, declare
    from tqppo.queue.client import Queue

    declare(Column("disk_bytes", Kind.ROW, "uint8", trailing=(None,)))
    queue = Queue.create("simple", budget_bytes=64 << 20, local=True)
    queue.put(["a"], {"disk_bytes": torch.ones(1, 2 * MIB, dtype=torch.uint8)})
    with refused(disk):
        queue.snapshot(disk / "queue")
    assert names(disk / "queue") == []
    queue.snapshot(big / "queue")
    assert queue.list().keys == ("a",)
    queue.close()


@writer
def scores_of_teachers(disk: Path, big: Path) -> None:
    """A cache: what does not fit is computed again."""
    import numpy as np

    from tqppo.rollout.teachers.cache import ScoreCache

    cache, kept = ScoreCache(disk / "one.sqlite", 1 << 30), {"teacher_logprobs": np.ones(1000)}
    cache.open()
    cache.put(b"before", kept)
    filler = fill(disk)
    for key in (b"small", b"large"):
        cache.put(key, {"teacher_logprobs": np.ones(MIB)})
        assert cache.get(key) is None
    assert cache.get(b"before") is not None
    filler.unlink()
    cache.put(b"after", kept)
    assert cache.get(b"after") is not None
    cache.close()


@writer
def trajectories(disk: Path, big: Path) -> None:
    import torch

    from tqppo.algorithms.advantages import EstimateOptions
    from tqppo.queue.client import Queue
    from tqppo.queue.meta import Jagged
    from tqppo.tiny.model import write_tiny_model
    from tqppo.workers.estimator import Estimator, EstimatorSpec

    queue = Queue.create("simple", local=True)
    columns = {"tokens": Jagged(torch.full((3,), 65), [3]), "rollout_logprobs": Jagged(torch.zeros(2), [2])}
    columns["advantages"] = Jagged(torch.zeros(2), [2])
    batch = queue.put(["p_0_0"], columns, tags=[{"prompt_len": 1}])
    spec = EstimatorSpec("grpo", EstimateOptions(), 8, 4, tokenizer=str(write_tiny_model(big / "model")))
    estimator, filler = Estimator(spec, queue), fill(disk)
    with refused(disk):
        estimator.write_trajectories(batch, disk / "trajectories" / "step_000001.jsonl")
    assert names(disk / "trajectories") == []
    filler.unlink()
    estimator.write_trajectories(batch, disk / "trajectories" / "step_000001.jsonl")
    queue.close()


# -- without a free inode ----------------------------------------------------------------------------------------------


@writer
def names_of_files(disk: Path, big: Path) -> None:
    """There are bytes, but no file can be made: every writer that makes one."""
    import numpy as np

    from tqppo import space
    from tqppo.metrics.files import EventLog, MetricsLog
    from tqppo.rollout.teachers.cache import ScoreCache
    from tqppo.run.checkpoint import CheckpointStore
    from tqppo.run.folder import new_run
    from tqppo.run.lock import RunLock

    subprocess.run(["mount", "-o", "remount,nr_inodes=1", str(disk)], check=True)
    tries: list[Callable[[], object]] = [
        lambda: space.allocate(disk / "weights", 10),
        lambda: space.write_whole(disk / "config", b"x"),
        lambda: MetricsLog(disk / "metrics.jsonl").write(1, {}),
        lambda: CheckpointStore(disk / "checkpoints").write(1, lambda folder: {}, {}),
        lambda: new_run(disk / "runs", "mine", preset="", model=""),
        lambda: RunLock(disk).__enter__(),
    ]
    for attempt in tries:
        with refused(disk):
            attempt()
    EventLog(disk / "events.jsonl").write("warning")
    cache = ScoreCache(disk / "teachers" / "one.sqlite", 1 << 20)
    cache.open()
    cache.put(b"key", {"x": np.ones(1)})
    assert cache.get(b"key") is None


def main(place: Path) -> None:
    for name, work in WRITERS.items():
        disk, big = place / name / "disk", place / name / "big"
        for folder in (disk, big):
            folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
        try:
            work(disk, big)
            print(f"{name}: ok", flush=True)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the others go on
            print(f"{name}: {traceback.format_exc()!r}", flush=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]))
