"""Snapshots on disk: whole or absent, and checked before anything changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disks import files_of_at_most

from tqppo.columns import Column, Kind, declare
from tqppo.errors import CheckpointError, OutOfSpace
from tqppo.queue.client import Queue
from tqppo.queue.snapshots import FORMAT, INDEX

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
