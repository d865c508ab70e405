"""Shared-memory files: reused, but never while a reader has them; private to the user; never SIGBUS when full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
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

from tqppo.columns import Column, Kind, declare
from tqppo.errors import QueueError
from tqppo.queue.blocks.block import Block
from tqppo.queue.blocks.encode import encode

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


def test_a_free_file_is_reused_for_about_the_same_size(files: Any) -> None:
    first = files.write(block())
    files.free(first)
    again = block(size=(1 << 20) + 5000, value=2)
    second = files.write(again)
    assert file_of(second) == file_of(first)
    assert (read(files, second, again).values("segment_bytes") == 2).all()
    assert len(list(files.files("live"))) == 1


def test_a_file_is_not_reused_while_a_reader_has_it(files: Any) -> None:
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


def test_a_reader_s_changes_are_its_own(files: Any) -> None:
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
    files.free(name)  # does not concern the block that has the file now
    assert (read(files, place, second).values("segment_bytes") == 3).all()
    files.free("never-there")


def test_a_half_written_block_is_not_read(files: Any) -> None:
    kept = block()
    name = files.write(kept)
    handle = os.open(files.folder / "live" / name, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a writer does
    assert read(files, name, kept) is None
    os.close(handle)
    assert read(files, name, kept) is not None


def test_a_block_that_is_locked_for_a_moment_is_read_all_the_same(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LOCK_TRIES", 20_000)  # on a busy machine a moment may be long
    kept = block()
    name = files.write(kept)
    handle = os.open(files.folder / "live" / name, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a sweep does
    threading.Timer(0.005, os.close, [handle]).start()
    assert read(files, name, kept) is not None


def test_a_writer_that_looks_for_a_free_file_never_locks_a_block(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.free(files.write(block()))
    stale = os.listdir(files.folder / "free")
    kept = block(value=5)
    name = files.write(kept)  # of another process
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


def test_small_blocks_are_copied_and_their_files_deleted_at_once(files: Any) -> None:
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


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_that_names_folder_and_bytes_and_leaves_no_file(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(
        QueueError, match=rf"needs 1,04\d,\d+ bytes, and {files.folder} has [\d,]+ free .*No space left"
    ):
        files.write(block())
    assert not list(files.files("live"))


def test_memory_is_allocated_before_it_is_written_through_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_folder() as base:
        files = segments.Segments.create("tqppo-queue-test", BUDGET, base)
        sparse = files.folder / "free" / f"{1 << 20}-sparse"
        with open(sparse, "wb") as file:
            file.truncate(1 << 20)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(QueueError, match="No space left"):
                files.write(block(size=(1 << 20) - 4096))
        assert not list(files.files("live"))
        files.remove()


FULL = """
import importlib, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
segments = importlib.import_module("tqppo_backends.storage.segments")
from test_segments import block, read
from tqppo.errors import QueueError
segments.SHARED_MEMORY = Path(sys.argv[2])  # a file system of 8 MiB, mapped like /dev/shm
files = segments.Segments.create("tqppo-queue-full", 1 << 30, sys.argv[2])
for name in ("a", "b"):
    os.truncate(os.open(f"{files.folder}/free/{1 << 20}-{name}", os.O_CREAT | os.O_RDWR, 0o600), 1 << 20)
kept = [(files.write(each), each) for each in [block(size=(1 << 20) - 4096, value=i) for i in range(2)]]  # reuse both
written = 2
try:
    while True:
        each = block(size=(1 << 20) - 4096, value=written)
        kept.append((files.write(each), each))
        written += 1
        os.truncate(os.open(f"{files.folder}/free/{1 << 20}-{written}", os.O_CREAT | os.O_RDWR, 0o600), 1 << 20)
except QueueError as error:
    print(error)
assert 6 <= written <= 8, written
assert all((read(files, place, each).values("segment_bytes") == i).all() for i, (place, each) in enumerate(kept))
files.remove()
print("all is well")
"""


def test_a_file_system_that_is_really_full_is_an_error_and_never_a_bus_error(tmp_path: Path) -> None:
    """Every free file here is sparse, so that a write through a mapping needs new pages."""
    mount = 'mount -t tmpfs -o size=8m tmpfs "$3" && exec "$1" -c "$0" "$2" "$3"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, FULL, sys.executable]
    command += [os.path.dirname(__file__), str(tmp_path)]
    if subprocess.run([*command[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.endswith("all is well\n"), ended
    assert "node out of memory" in ended.stdout


def test_free_files_are_deleted_when_memory_is_short(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
