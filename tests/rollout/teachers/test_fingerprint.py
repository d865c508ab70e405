"""A fingerprint changes with the model's files, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tqppo.rollout.teachers import fingerprint
from tqppo.rollout.teachers.fingerprint import model_fingerprint


def test_a_copy_has_the_same_fingerprint_and_other_weights_another(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    before = model_fingerprint(str(tiny_model))
    assert before == model_fingerprint(str(copy)) != ""
    (copy / "README.md").write_text("a note")
    assert model_fingerprint(str(copy)) == before
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(str(copy)) != before


def test_another_tokenizer_is_another_teacher(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    assert model_fingerprint(str(copy)) != model_fingerprint(str(tiny_model))


def test_large_files_are_told_apart_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 16)
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    (one / "model.safetensors").write_bytes(bytes(10_000))
    (other / "model.safetensors").write_bytes(bytes(9_000) + b"x" * 1_000)
    assert model_fingerprint(str(one)) != model_fingerprint(str(other))


def test_a_model_that_is_not_on_this_machine_has_none() -> None:
    assert model_fingerprint("no-one/no-such-model") == ""
    assert model_fingerprint("not a name at all") == ""
