"""Files that stay mapped between two uses: readers do not see each other's changes, deleted files hold no memory."""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tqppo.columns import Column, Kind, declare
from tqppo.queue.blocks.block import Block
from tqppo.queue.blocks.encode import encode

segments = importlib.import_module("tqppo_backends.storage.segments")
mappings = importlib.import_module("tqppo_backends.storage.mappings")

declare(Column("mapped_first", Kind.ROW, "uint8", trailing=(None,)))
declare(Column("mapped_second", Kind.ROW, "uint8", trailing=(None,)))
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def block(value: int, size: int = MIB) -> Block:
    """Two columns of this size together, every byte of this value."""
    halves = torch.full((2, 1, size // 2), value, dtype=torch.uint8)
    return encode({"mapped_first": halves[0], "mapped_second": halves[1]}, ["a"])


def opened(files: Any, budget: int = 64 * MIB) -> Any:
    """The files as another process opens them; that works in one process because locks belong to descriptors."""
    return segments.Segments(files.folder, budget)


def read(files: Any, place: str, of: Block, column: str = "mapped_first") -> np.ndarray:
    return files.read(place, of.layout.block, of.num_bytes, [column]).values(column)


def file_of(place: str) -> str:
    return place.partition(".")[0]


def kept(pool: Any) -> list[Any]:
    return list(pool._idle.values())


def written_twice(files: Any, size: int = MIB) -> str:
    """A free file that its writer has mapped."""
    for value in (1, 2):
        place = files.write(block(value, size))
        files.free(place)
    return file_of(place)


@pytest.fixture
def files() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as folder:
        made = segments.Segments.create("tqppo-queue-test", 64 * MIB, folder)
        yield made
        made.remove()


# -- the same mapping again ------------------------------------------------------------------------------------------


def test_writers_and_readers_use_their_mappings_again(files: Any) -> None:
    name = written_twice(files)
    (writer,) = kept(files._written)
    memory = writer.memory
    for value in (3, 4):
        fresh = block(value)
        place = files.write(fresh)
        assert file_of(place) == name
        assert (read(files, place, fresh) == value).all()
        assert (read(files, place, fresh, "mapped_second") == value).all()
        files.free(place)
    assert kept(files._written) == [writer]
    assert writer.memory is memory
    assert len(kept(files._read)) == 1


@pytest.mark.parametrize("place", [0, PAGE - 1, PAGE, 123_456, MIB // 2 - 1])
def test_a_reader_s_changes_are_gone_with_its_lease(files: Any, place: int) -> None:
    first = block(1)
    name = files.write(first)
    mine = read(files, name, first)
    mine[place] = 99
    others = read(files, name, first)
    assert (others == 1).all()
    del mine, others
    assert (read(files, name, first) == 1).all()
    read(files, name, first)[:] = 7
    files.free(name)
    second = block(2)
    place = files.write(second)
    assert file_of(place) == file_of(name)
    assert (read(files, place, second) == 2).all()


def test_a_mapping_whose_changes_cannot_be_found_is_not_used_again(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError("no access to the page table")

    monkeypatch.setattr(mappings, "_private_pages", denied)
    first = block(1)
    name = files.write(first)
    read(files, name, first)[:] = 7
    assert kept(files._read) == []
    assert (read(files, name, first) == 1).all()


def test_a_file_that_has_grown_is_mapped_anew(files: Any) -> None:
    name = written_twice(files)
    reader = opened(files)
    for value, size in ((3, MIB), (4, MIB + MIB // 2), (5, MIB + MIB // 2)):
        made = block(value, size)
        place = files.write(made)
        assert file_of(place) == name
        assert (read(reader, place, made, "mapped_second") == value).all()
        files.free(place)
    (writer,) = kept(files._written)
    assert len(writer.memory) >= made.num_bytes


def test_a_writer_prefers_the_file_that_it_has_mapped(files: Any) -> None:
    other = opened(files)
    theirs = other.write(block(1))
    mine = written_twice(files)
    other.free(theirs)
    assert file_of(files.write(block(3))) == mine


def test_a_file_with_a_reader_is_not_reused_by_a_writer_that_has_it_mapped(files: Any) -> None:
    name, first = written_twice(files), block(5)
    reader = opened(files)
    place = files.write(first)
    assert file_of(place) == name
    values = read(reader, place, first)
    files.free(place)
    other = files.write(block(6))
    assert file_of(other) != name
    assert (values == 5).all()
    del values
    files.free(other)
    assert {file_of(files.write(block(value))) for value in (7, 8)} == {name, file_of(other)}


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_handles_stay_bounded_however_many_files_there_are(files: Any) -> None:
    files.budget_bytes = 1 << 30
    blocks = [block(1, 300_000) for _ in range(mappings.MAX_IDLE_FILES + 20)]
    before = psutil.Process().num_fds()
    for _ in range(2):
        names = [files.write(each) for each in blocks]
        for name, each in zip(names, blocks, strict=True):
            assert (read(files, name, each) == 1).all()
        for name in names:
            files.free(name)
        assert len(kept(files._read)) == mappings.MAX_IDLE_FILES
    assert len(kept(files._written)) == mappings.MAX_IDLE_FILES
    assert psutil.Process().num_fds() <= before + 4 * mappings.MAX_IDLE_FILES


def test_deleted_files_make_room_for_mappings_of_others(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "MAX_IDLE_FILES", 1)
    old = written_twice(files)
    for entry in os.listdir(files.folder / "free"):
        mappings.discard(str(files.folder / "free" / entry))
    new = written_twice(files)
    assert new != old
    assert [file.name for file in kept(files._written)] == [new]


# -- deleted files ---------------------------------------------------------------------------------------------------


def held_bytes(handle: int) -> int:
    return 512 * os.fstat(handle).st_blocks


def test_a_deleted_file_holds_no_memory_though_it_is_mapped(files: Any) -> None:
    name, reader, first = written_twice(files), opened(files), block(3)
    place = files.write(first)
    assert file_of(place) == name
    assert (read(reader, place, first) == 3).all()
    files.free(place)
    (writing,), (reading,) = kept(files._written), kept(reader._read)
    assert held_bytes(writing.handle) >= MIB
    files.write(block(4, 63 * MIB))  # over budget with the free file
    assert held_bytes(writing.handle) == held_bytes(reading.handle) == 0
    assert reader.read(place, first.layout.block, first.num_bytes) is None


def test_a_deleted_file_keeps_its_memory_until_its_reader_drops_it(files: Any) -> None:
    first, idle, reader = block(3), opened(files), opened(files)
    name = files.write(first)
    assert (read(idle, name, first) == 3).all()
    values = read(reader, name, first)
    files.remove()
    (mapped,) = kept(idle._read)
    assert (values == 3).all()
    assert held_bytes(mapped.handle) >= MIB
    del values
    gc.collect()
    assert held_bytes(mapped.handle) == 0
    assert kept(reader._read) == []


def test_a_deleted_file_whose_last_reader_was_killed_is_freed_at_the_next_use(files: Any) -> None:
    first, second, idle, reader = block(3), block(4), opened(files), opened(files)
    place = files.write(first)
    assert (read(idle, place, first) == 3).all()
    (mapped,) = kept(idle._read)
    killed = reader._opened(place)
    assert killed.lock(fcntl.LOCK_SH)
    mappings.discard(f"{files.folder}/live/{place}")
    del killed  # as the kernel does it: closed, without an unlock
    assert held_bytes(mapped.handle) >= MIB
    assert (read(idle, files.write(second), second) == 4).all()
    assert held_bytes(mapped.handle) == 0
    assert mapped not in kept(idle._read)


# -- forks -----------------------------------------------------------------------------------------------------------

FORKED = """
import importlib, os, sys
sys.path.insert(0, sys.argv[1])
from test_mappings import block, file_of, kept, opened, read, segments
files = segments.Segments.create("tqppo-queue-forked", 1 << 26, sys.argv[2])
first = block(3)
name = files.write(first)
idle = opened(files)
read(idle, name, first)
values = read(files, name, first)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(writer)
    os.read(reader, 1)  # until the parent has dropped its array and written again
    del idle
    os._exit(0 if (values == 3).all() else 1)
os.close(reader)
assert idle._read.take(file_of(name)) is None, "a file that both processes have open shares its lock"
del values
assert kept(files._read) == []
files.free(name)
other = files.write(block(4))
assert file_of(other) != file_of(name), "written again under the child"
os.close(writer)
assert os.waitpid(child, 0)[1] == 0, "the child saw other bytes"
assert file_of(files.write(block(5))) == file_of(name)
files.remove()
print("all is well")
"""


def run_alone(script: str, tmp_path: Path) -> None:
    """Run a script in a process of its own, because this one has threads."""
    command = [sys.executable, "-c", script, os.path.dirname(__file__), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "all is well\n", ended.stderr


@pytest.mark.slow
def test_a_forked_child_keeps_what_it_reads(tmp_path: Path) -> None:
    run_alone(FORKED, tmp_path)


THREADS = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from test_mappings import block, read, segments
files = segments.Segments.create("tqppo-queue-forked", 1 << 26, sys.argv[2])
first = block(3)
name = files.write(first)
is_done = False

def busy():
    while not is_done:
        read(files, name, first)

threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(40):
    held = read(files, name, first)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        del held
        os._exit(0 if (read(files, name, first) == 3).all() else 1)
    del held
    assert os.waitpid(child, 0)[1] == 0
is_done = True
for thread in threads:
    thread.join()
files.remove()
print("all is well")
"""


@pytest.mark.slow
def test_a_child_forked_while_threads_read_is_not_held_up(tmp_path: Path) -> None:
    run_alone(THREADS, tmp_path)


# -- any order -------------------------------------------------------------------------------------------------------


class FilesMachine(RuleBasedStateMachine):
    """Two users with locks of their own, like two processes, write, read, change and free files in any order."""

    def __init__(self, files: Any) -> None:
        super().__init__()
        self.owner = files
        self.users = [opened(files, budget=8 * MIB) for _ in range(2)]
        self.live: dict[str, tuple[Block, int]] = {}
        self.held: list[tuple[np.ndarray, int]] = []
        self.next_value = 0

    def teardown(self) -> None:
        self.held.clear()
        for name in self.live:
            self.owner.free(name)

    @rule(user=st.integers(0, 1), size=st.sampled_from([1000, 300_000, 400_000, 700_000, 2 * MIB]))
    def write(self, user: int, size: int) -> None:
        self.next_value = self.next_value % 250 + 1
        made = block(self.next_value, size)
        name = self.users[user].write(made)
        assert name not in self.live
        self.live[name] = made, self.next_value

    @precondition(lambda self: self.live)
    @rule(user=st.integers(0, 1), data=st.data(), column=st.sampled_from(["mapped_first", "mapped_second"]))
    def read(self, user: int, data: st.DataObject, column: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        made, value = self.live[name]
        self.held.append((read(self.users[user], name, made, column), value))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        values, _ = self.held[place]
        values[:] = 251
        self.held[place] = values, 251

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.live)
    @rule(user=st.integers(0, 1), data=st.data())
    def free(self, user: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.users[user].free(name)
        made, _ = self.live.pop(name)
        assert self.users[1 - user].read(name, made.layout.block, made.num_bytes) is None

    @invariant()
    def readers_have_what_they_read(self) -> None:
        for values, value in self.held:
            assert (values == value).all()


@pytest.mark.slow
def test_whatever_the_order_readers_have_the_bytes_they_asked_for(files: Any) -> None:
    run_state_machine_as_test(
        lambda: FilesMachine(files),  # type: ignore[arg-type]
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
