"""The warm start: the same bytes each time, loss on answers only, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tqppo.data.prompts import DataSpec, demonstrations
from tqppo.errors import DataError
from tqppo.tiny import warm_start
from tqppo.tiny.tokenizer import byte_tokenizer

MODEL = {"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": False}


def _prepare(folder: Path, **settings: Any) -> Path:
    given = {"model": MODEL, "demonstrations": demonstrations(DataSpec(), seed=0), "steps": 2, "batch_size": 8}
    return warm_start.prepare(folder, **{**given, **settings})


def _hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_arguments_give_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first = _hash(_prepare(tmp_path / "a"))
    assert first == _hash(_prepare(tmp_path / "b"))
    assert first != _hash(_prepare(tmp_path / "c", seed=1))
    assert first != _hash(_prepare(tmp_path / "d", steps=3))
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_finished_folder_is_used_again_and_a_half_one_is_not(tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "model")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert _prepare(tmp_path / "model") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    (folder / warm_start.DONE).unlink()
    (tmp_path / ".model.123").mkdir()  # what a killed attempt left
    (folder / "model.safetensors").write_bytes(b"half")
    _prepare(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_the_model_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume reads it, long after the power may have failed."""
    synced, fsync = set[str](), os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.add(path.name if path.parent.name.startswith(".model.") else "")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    folder = _prepare(tmp_path / "model", steps=0)
    assert {path.name for path in folder.iterdir()} <= synced


class _Broken(Sequence[Any]):
    """Demonstrations that fail after the first batch."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: Any) -> Any:
        if index:
            raise DataError("row 9 is broken")
        return [{"role": "user", "content": "31"}], "13"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 9 is broken"):
        _prepare(tmp_path / "model", demonstrations=_Broken())
    assert list(tmp_path.iterdir()) == []


def test_without_steps_the_model_is_as_it_was_made(tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "model", steps=0)
    assert json.loads((folder / warm_start.DONE).read_text())["losses"] == []
    AutoModelForCausalLM.from_pretrained(folder)


def test_only_the_answer_and_its_end_have_labels() -> None:
    tokenizer = byte_tokenizer()
    examples = [([{"role": "user", "content": "31"}], "13"), ([{"role": "user", "content": "7"}], "7")]
    tokens, labels = warm_start.batch(tokenizer, examples)
    assert tokens.shape == labels.shape == (2, 1 + 2 + 1 + 2 + 1)
    assert tokenizer.decode(labels[0][labels[0] != warm_start.IGNORED]) == "13<|end|>"
    assert tokenizer.decode(labels[1][labels[1] != warm_start.IGNORED]) == "7<|end|>"
    assert tokens[1, -1] == tokenizer.pad_token_id


def test_the_loss_falls(tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "model", steps=15, batch_size=64)
    losses = json.loads((folder / warm_start.DONE).read_text())["losses"]
    assert losses[-1] < 0.5 * losses[0]
