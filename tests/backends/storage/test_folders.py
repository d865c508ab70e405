"""Where a run's files are, and which folders of dead runs are deleted."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

folders = importlib.import_module("tqppo_backends.storage.folders")
segments = importlib.import_module("tqppo_backends.storage.segments")

BUDGET = 64 << 20


def test_folders_of_dead_runs_are_deleted_and_all_others_stay(tmp_path: Path) -> None:
    living = segments.Segments.create("tqppo-queue-test", BUDGET, str(tmp_path))
    script = (
        "import importlib, sys; s = importlib.import_module('tqppo_backends.storage.segments');"
        "kept = s.Segments.create('tqppo-queue-dead', 1 << 20, sys.argv[1]); print(kept.folder)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120, capture_output=True)
    (tmp_path / "tqppo-queue-notes").mkdir()
    (tmp_path / "tqppo-queue-notes" / "mine.txt").touch()
    assert (tmp_path / "tqppo-queue-dead").exists()
    assert folders.reap(tmp_path) == ["tqppo-queue-dead"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tqppo-queue-notes", "tqppo-queue-test"]
    living.remove()


def test_a_dead_run_that_filled_the_memory_is_reaped_before_a_place_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "tqppo-queue-dead"
    dead.mkdir()
    (dead / ".lock").touch()
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    is_full = lambda folder: folders.shutil._ntuple_diskusage(100, 100, 0 if dead.exists() else BUDGET)  # noqa: E731
    monkeypatch.setattr(folders.shutil, "disk_usage", is_full)
    made = segments.Segments.create("tqppo-queue-next", BUDGET)
    assert made.folder == tmp_path / "tqppo-queue-next"
    made.remove()


def test_small_shared_memory_falls_back_with_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "absent")
    with caplog.at_level(logging.WARNING):
        assert folders.choose_parent(BUDGET) != tmp_path / "absent"
    assert "does not exist" in caplog.text
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(folders, "MIN_FREE_BYTES", 1 << 60)
    assert folders.choose_parent(1 << 60) != tmp_path
    assert "MB left" in caplog.text
    assert folders.choose_parent(BUDGET, str(tmp_path / "mine")) == tmp_path / "mine"
