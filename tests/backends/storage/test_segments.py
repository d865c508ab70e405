"""Shared-memory files: used again, but never under a reader; private to the user; gone with their owner."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tqppo.block import Block
from tqppo.columns import Column, Kind, declare
from tqppo.errors import QueueError
from tqppo.queue.blocks.encode import encode

folders = importlib.import_module("tqppo_backends.storage.folders")
segments = importlib.import_module("tqppo_backends.storage.segments")

declare(Column("segment_bytes", Kind.ROW, "uint8", trailing=(None,)))
BUDGET = 64 << 20


def memory_folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm")


def block(size: int = 1 << 20, value: int = 1) -> Block:
    return encode({"segment_bytes": torch.full((1, size), value, dtype=torch.uint8)}, ["a"])


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """On disk, files are never written by a mapping."""
    with contextlib.ExitStack() as made_for_it:
        base = str(tmp_path) if request.param == "disk" else made_for_it.enter_context(memory_folder())
        made = segments.Segments.create("tqppo-queue-test", BUDGET, base)
        yield made
        made.remove()


def read(files: Any, place: str, of: Block) -> Any:
    return files.read(place, of.layout.block, of.num_bytes)


def file_of(place: str) -> str:
    return place.partition(".")[0]


def test_a_cleared_file_is_used_again_for_about_the_same_size(files: Any) -> None:
    first = files.write(block())
    files.free(first)
    again = block(size=(1 << 20) + 5000, value=2)
    second = files.write(again)
    assert file_of(second) == file_of(first)
    assert (read(files, second, again).values("segment_bytes") == 2).all()
    assert len(list(files.files("live"))) == 1


def test_a_file_is_not_written_again_while_a_reader_has_it(files: Any) -> None:
    first = block(value=7)
    name = files.write(first)
    values = torch.frombuffer(read(files, name, first).values("segment_bytes"), dtype=torch.uint8)
    files.free(name)
    other = files.write(block(value=9))
    assert file_of(other) != file_of(name)
    assert (values == 7).all()
    del values
    files.free(other)
    assert {file_of(files.write(block())), file_of(files.write(block()))} == {file_of(name), file_of(other)}


def test_a_reader_may_write_to_its_copy_alone(files: Any) -> None:
    kept = block()
    name = files.write(kept)
    read(files, name, kept).values("segment_bytes")[:] = 5
    assert (read(files, name, kept).values("segment_bytes") == 1).all()


def test_a_block_that_is_gone_is_none_and_never_other_bytes(files: Any) -> None:
    first = block()
    name = files.write(first)
    files.free(name)
    assert read(files, name, first) is None
    second = block(value=3)
    place = files.write(second)
    assert file_of(place) == file_of(name)
    assert read(files, name, first) is None
    files.free(name)  # of a block that is gone: whoever has the file now keeps it
    assert (read(files, place, second).values("segment_bytes") == 3).all()
    files.free("never-there")


def test_a_half_written_block_is_not_read(files: Any) -> None:
    kept = block()
    name = files.write(kept)
    handle = os.open(files.folder / "live" / name, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a writer has it
    assert read(files, name, kept) is None
    os.close(handle)
    assert read(files, name, kept) is not None


def test_a_block_that_is_locked_for_a_moment_is_read_all_the_same(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LOCK_TRIES", 20_000)  # on a busy machine a moment may be long
    kept = block()
    name = files.write(kept)
    handle = os.open(files.folder / "live" / name, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as whoever sweeps has it
    threading.Timer(0.005, os.close, [handle]).start()
    assert read(files, name, kept) is not None


def test_who_looks_for_a_free_file_never_locks_a_block(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.free(files.write(block()))
    stale = os.listdir(files.folder / "free")
    kept = block(value=5)
    name = files.write(kept)  # somebody else's
    monkeypatch.setattr(segments, "LOCK_TRIES", 1)
    lock, seen = segments.LeasedFile.lock, []

    def watched(file: Any, kind: int) -> bool:
        is_locked = lock(file, kind)
        if kind == fcntl.LOCK_EX:
            seen.append(read(files, name, kept))
        return is_locked

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "listdir", lambda folder: stale)
        patch.setattr(segments.LeasedFile, "lock", watched)
        files.write(block(value=6))
    assert None not in seen
    assert (read(files, name, kept).values("segment_bytes") == 5).all()


def test_small_blocks_are_private_copies_and_their_files_go_at_once(files: Any) -> None:
    small = block(size=100)
    name = files.write(small)
    found = read(files, name, small)
    files.free(name)
    assert not list(files.files("live"))
    assert not list(files.files("free"))
    assert (found.values("segment_bytes") == 1).all()


def test_free_files_make_room_for_new_ones_within_the_budget(files: Any) -> None:
    names = [files.write(block(size=8 << 20)) for _ in range(6)]
    for name in names:
        files.free(name)
    files.write(block(size=40 << 20))
    total = sum(size for part in ("live", "free") for _, size in files.files(part))
    assert total <= BUDGET


def test_small_blocks_too_make_room_of_free_files(files: Any) -> None:
    for name in [files.write(block(size=8 << 20)) for _ in range(6)]:
        files.free(name)
    for _ in range(400):
        files.write(block(size=100_000))
    total = sum(size for part in ("live", "free") for _, size in files.files(part))
    assert total <= BUDGET + BUDGET // 16


def test_a_file_much_larger_than_a_block_is_not_used_for_it(files: Any) -> None:
    large = files.write(block(size=2 << 20))
    files.free(large)
    assert file_of(files.write(block(size=1 << 20))) != file_of(large)


def test_a_block_just_written_is_not_swept_however_old_its_file(files: Any) -> None:
    first = files.write(block())
    for _ in range(2):
        files.free(first)
        for entry in os.scandir(files.folder / "free"):
            os.utime(entry.path, (0, 0))
        written = block(value=2)
        first = files.write(written)
        assert files.sweep(set(), older_than_s=60) == []
        assert read(files, first, written) is not None
    os.utime(files.folder / "live" / first, (0, 0))
    assert files.sweep({first}, older_than_s=60) == []
    assert files.sweep(set(), older_than_s=60) == [first]


def test_files_are_for_their_user_only(files: Any) -> None:
    name = files.write(block())
    assert os.stat(files.folder / "live" / name).st_mode & 0o777 == 0o600
    assert os.stat(files.folder).st_mode & 0o777 == 0o700


def test_a_full_disk_is_an_error_that_leaves_no_file(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, buffers: Any, position: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(QueueError, match="No space left"):
        files.write(block())
    assert not list(files.files("live"))


def test_free_files_go_before_memory_is_short(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.free(files.write(block(size=8 << 20)))
    write, tries = os.pwritev, []

    def full_at_first(handle: int, buffers: Any, position: int) -> int:
        tries.append(position)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return write(handle, buffers, position)

    monkeypatch.setattr(os, "pwritev", full_at_first)
    kept = block()
    assert (read(files, files.write(kept), kept).values("segment_bytes") == 1).all()
    assert list(files.files("free")) == []


def test_a_write_larger_than_one_system_call_is_whole(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_WRITE", 100_000)
    data = torch.arange(1 << 20, dtype=torch.int64).view(torch.uint8).view(1, -1)
    whole = encode({"segment_bytes": data}, ["a"])
    name = files.write(whole)
    assert np.array_equal(read(files, name, whole).values("segment_bytes"), data.numpy()[0])


def test_the_reaper_takes_dead_runs_and_leaves_live_ones(tmp_path: Path) -> None:
    living = segments.Segments.create("tqppo-queue-test", BUDGET, str(tmp_path))
    script = (
        "import importlib, sys; s = importlib.import_module('tqppo_backends.storage.segments');"
        "kept = s.Segments.create('tqppo-queue-dead', 1 << 20, sys.argv[1]); print(kept.folder)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120, capture_output=True)
    (tmp_path / "tqppo-queue-of-somebody").mkdir()
    assert (tmp_path / "tqppo-queue-dead").exists()
    assert folders.reap(tmp_path) == ["tqppo-queue-dead"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tqppo-queue-of-somebody", "tqppo-queue-test"]
    living.remove()


def test_a_dead_run_that_filled_the_memory_is_reaped_before_a_place_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "tqppo-queue-dead"
    dead.mkdir()
    (dead / ".lock").touch()
    monkeypatch.setattr(folders, "SHARED", tmp_path)
    is_full = lambda folder: folders.shutil._ntuple_diskusage(100, 100, 0 if dead.exists() else BUDGET)  # noqa: E731
    monkeypatch.setattr(folders.shutil, "disk_usage", is_full)
    made = segments.Segments.create("tqppo-queue-next", BUDGET)
    assert made.folder == tmp_path / "tqppo-queue-next"
    made.remove()


def test_small_shared_memory_falls_back_with_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(folders, "SHARED", tmp_path / "absent")
    with caplog.at_level(logging.WARNING):
        assert folders.choose_parent(BUDGET) != tmp_path / "absent"
    assert "does not exist" in caplog.text
    monkeypatch.setattr(folders, "SHARED", tmp_path)
    monkeypatch.setattr(folders, "MIN_FREE_BYTES", 1 << 60)
    assert folders.choose_parent(1 << 60) != tmp_path
    assert "MB left" in caplog.text
    assert folders.choose_parent(BUDGET, str(tmp_path / "mine")) == tmp_path / "mine"
