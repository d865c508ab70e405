"""Exports: whole or as before, and never taken for those of another step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tqppo.run.exported import ExportedModel


@pytest.fixture
def model(tmp_path: Path) -> ExportedModel:
    return ExportedModel(tmp_path / "export" / "hf")


def make_export(model: ExportedModel, content: str) -> None:
    model.partial.mkdir(parents=True)
    (model.partial / "config.json").write_text(content)


def nothing_yet(model: ExportedModel) -> None:
    """Killed while the new export was made, or synced."""


def note_is_gone(model: ExportedModel) -> None:
    (model.path.parent / ".step").unlink()


def old_one_is_away(model: ExportedModel) -> None:
    note_is_gone(model)
    model.path.rename(model.path.with_name(".before-hf"))


def new_one_is_there(model: ExportedModel) -> None:
    old_one_is_away(model)
    model.partial.rename(model.path)


@pytest.mark.parametrize(
    ("killed", "left"), [(nothing_yet, "3"), (note_is_gone, "3"), (old_one_is_away, "3"), (new_one_is_there, "6")]
)
def test_an_export_that_is_cut_short_is_never_taken_for_another_step(
    model: ExportedModel, killed: Callable[[ExportedModel], None], left: str
) -> None:
    """However far a kill let it come: one export is whole, and that of step 6 is not taken for made."""
    make_export(model, "3")
    model.replace(3)
    make_export(model, "6")
    killed(model)
    assert model.step in (None, 3)
    model.remove_partial()
    assert (model.path / "config.json").read_text() == left
    assert [path.name for path in model.path.parent.iterdir() if path.name != ".step"] == ["hf"]


def test_an_export_is_on_the_disk_before_its_step_is_noted(
    model: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_export(model, "3")
    synced, fsync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    model.replace(3)
    assert synced[:2] == ["config.json", ".partial-hf"]
    assert synced[2] == "..step.draft"


def test_an_export_that_is_gone_is_of_no_step(model: ExportedModel) -> None:
    make_export(model, "3")
    model.replace(3)
    shutil.rmtree(model.path)
    assert model.step is None


def test_an_export_replaces_the_one_before_and_its_step_is_known(model: ExportedModel) -> None:
    assert model.step is None
    for step in (3, 6):
        make_export(model, str(step))
        model.replace(step)
        assert model.step == step
        assert (model.path / "config.json").read_text() == str(step)
    assert sorted(path.name for path in model.path.parent.iterdir()) == [".step", "hf"]
