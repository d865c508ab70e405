"""Snapshots on disk: whole or absent, and checked before anything changes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import files_of_at_most

from tqppo.columns import Column, Kind, declare
from tqppo.errors import CheckpointError, OutOfSpace
from tqppo.queue.client import Queue
from tqppo.queue.saved import FORMAT, INDEX

declare(Column("snapshot_tokens", Kind.RAGGED, "int64"))


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=64 << 20, local=True)
    yield made
    made.close()


@pytest.fixture
def saved(queue: Queue, tmp_path: Path) -> Path:
    queue.put(["a", "b"], {"snapshot_tokens": [torch.arange(3), torch.arange(5)]}, tags=[{"order": 0}, {"order": 1}])
    queue.snapshot(tmp_path / "saved")
    return tmp_path / "saved"


def test_the_format_on_disk_is_one_json_file_and_a_file_per_block(saved: Path) -> None:
    state = json.loads((saved / INDEX).read_text())
    assert sorted(path.name for path in saved.iterdir()) == ["block_000001.tqb", INDEX]
    assert state["format"] == FORMAT
    assert state["tables"]["train"] == {
        "keys": ["a", "b"],
        "tags": [{"order": 0}, {"order": 1}],
        "columns": {"snapshot_tokens": [[1, 1], [0, 1]]},
    }


def test_a_folder_holds_one_snapshot(queue: Queue, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="already"):
        queue.snapshot(saved)


def test_a_snapshot_without_room_is_an_error_that_leaves_no_half_file(queue: Queue, tmp_path: Path) -> None:
    queue.put(["a"], {"snapshot_tokens": [torch.arange(1000)]})
    said = rf"{tmp_path / 'small'} has no room for \d+ bytes: File too large"
    with files_of_at_most(1000), pytest.raises(OutOfSpace, match=said):
        queue.snapshot(tmp_path / "small")
    assert list((tmp_path / "small").iterdir()) == []
    queue.snapshot(tmp_path / "small")  # the queue goes on, and the folder can be used
    queue.restore(tmp_path / "small")


def test_a_missing_block_or_another_format_is_refused_and_changes_nothing(queue: Queue, saved: Path) -> None:
    (saved / "block_000001.tqb").rename(saved / "elsewhere")
    with pytest.raises(CheckpointError, match=r"block_000001\.tqb is missing"):
        queue.restore(saved)
    (saved / INDEX).write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="has format 1"):
        queue.restore(saved)
    (saved / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        queue.restore(saved)
    assert queue.list().keys == ("a", "b")
    assert queue.stats()["blocks"] == 1


def signed(folder: Path, state: dict[str, object]) -> None:
    """Write an index with the checksum of its contents, as someone does who makes a snapshot by hand."""
    state.pop("crc32", None)
    (folder / INDEX).write_text(json.dumps({**state, "crc32": zlib.crc32(json.dumps(state, sort_keys=True).encode())}))


def placed(cells: list[list[int]]) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["tables"]["train"]["columns"].update(snapshot_tokens=cells)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file elsewhere": (lambda s: s["blocks"]["1"].update(file="../../etc/passwd"), "is no file of a block"),
    "a row outside of its block": (placed([[1, 1], [0, 7]]), "not in block 1"),
    "a row beyond all numbers": (placed([[1, 1], [0, 2**32]]), "a place for each key"),
    "a block that is not there": (placed([[9, 9], [0, 1]]), "not in block 9"),
    "a column of another name": (lambda s: s["tables"]["train"]["columns"].update(other=[[1, 1], [0, 1]]), "'other'"),
    "a key twice": (lambda s: s["tables"]["train"].update(keys=["a", "a"]), "a key twice"),
    "no tables": (lambda s: s.pop("tables"), "no tables or no blocks"),
    "tags for fewer keys": (lambda s: s["tables"]["train"].update(tags=[{}]), "tags for each key"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_with_a_right_checksum_and_wrong_contents_is_refused(queue: Queue, saved: Path, name: str) -> None:
    change, said = HOSTILE[name]
    state = json.loads((saved / INDEX).read_text())
    change(state)
    signed(saved, state)
    with pytest.raises(CheckpointError, match=said):
        queue.restore(saved)


def test_an_index_that_is_a_list_or_a_device_is_refused(queue: Queue, saved: Path) -> None:
    (saved / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="not a table"):
        queue.restore(saved)
    (saved / INDEX).unlink()
    (saved / INDEX).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        queue.restore(saved)


@pytest.mark.parametrize(("old", "new"), [(b"int64", b"int31"), (b"ragged", b"ragge_"), (b"\x03", b"\x7f")])
def test_a_block_with_a_right_checksum_and_a_wrong_header_or_offset_is_refused(
    queue: Queue, saved: Path, old: bytes, new: bytes
) -> None:
    block = saved / "block_000001.tqb"
    data = block.read_bytes()
    header = data.index(old) if len(old) > 1 else data.index(b"\x03", 128)
    block.write_bytes(data[:header] + new + data[header + len(new) :])
    state = json.loads((saved / INDEX).read_text())
    state["blocks"]["1"]["crc32"] = zlib.crc32(block.read_bytes())
    signed(saved, state)
    with pytest.raises(CheckpointError, match="is damaged"):
        queue.restore(saved)
