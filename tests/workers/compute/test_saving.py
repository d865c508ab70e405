"""What a rank saves while it goes on is what it had when the save began, to the byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import files_of_at_most

from tqppo.space import Digest
from tqppo.weights.file import Entry
from tqppo.weights.parts import TensorFile
from tqppo.workers.actor import Actor
from tqppo.workers.compute.saving import BackgroundWriter, LearnerPart, SavedPart


def part_of_one_tensor(tensor: torch.Tensor) -> LearnerPart:
    return LearnerPart([TensorFile("model.safetensors", [Entry.of("w", tensor)])], {"state.json": b"{}"})


def test_a_save_in_the_background_has_the_bytes_of_one_at_once_while_training_goes_on(
    make_actor: Callable[..., Actor], rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, may_write = make_actor(), threading.Event()
    try_write = LearnerPart.try_write

    def later(part: LearnerPart, folder: str) -> SavedPart:
        assert may_write.wait(60)
        return try_write(part, folder)

    actor.train(rows, step=1, sizes=[])
    expected = actor.save(str(tmp_path / "at-once"))
    monkeypatch.setattr(LearnerPart, "try_write", later)
    actor.begin_save(str(tmp_path / "behind"))
    assert actor.saved(0.0) is None
    actor.train(rows, step=2, sizes=[])
    torch.rand(3)
    may_write.set()
    assert actor.saved(60.0) == SavedPart(expected)
    assert actor.saved(0.0) == SavedPart(expected), "it can be asked again while other ranks write"
    for name, digest in expected.items():
        assert Digest.of(tmp_path / "behind" / name) == digest, name
    assert actor.save(str(tmp_path / "later"))["model.safetensors"] != expected["model.safetensors"]


def test_a_part_without_room_is_said_and_not_raised_so_that_the_worker_lives_on(tmp_path: Path) -> None:
    part = part_of_one_tensor(torch.ones(1000))
    saved = part.try_write(str(tmp_path / "first"))
    files = ("model.safetensors", "state.json")
    assert saved == SavedPart({name: Digest.of(tmp_path / "first" / name) for name in files})
    writer = BackgroundWriter()
    with files_of_at_most(100):
        assert f"{tmp_path / 'second'} has no room for" in part.try_write(str(tmp_path / "second")).problem
        writer.begin(part, str(tmp_path / "third"))
        found = writer.result(60.0)
    assert found is not None
    assert f"{tmp_path / 'third'} has no room for" in found.problem
    writer.close()


def test_any_other_error_of_the_thread_is_raised_where_the_part_is_asked_for(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    (tmp_path / "file").write_text("")
    writer.begin(part_of_one_tensor(torch.ones(1)), str(tmp_path / "file" / "folder"))
    with pytest.raises(NotADirectoryError):
        writer.result(60.0)
    writer.begin(part_of_one_tensor(torch.ones(1)), str(tmp_path / "folder"))  # and the next one is written
    writer.close()
    assert (tmp_path / "folder" / "state.json").is_file()
