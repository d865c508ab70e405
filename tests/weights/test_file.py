from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tqppo.weights import file as tensorfile
from tqppo.weights.file import Entry


def test_safetensors_reads_what_we_wrote(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "a": torch.randn(2, 2),
        "counter": torch.tensor(7, dtype=torch.int64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
    }
    tensorfile.write(tmp_path / "x.safetensors", [Entry.of(name, t) for name, t in tensors.items()])
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_rewriting_keeps_the_file_and_changes_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorfile.write(path, [Entry.of("w", torch.ones(1000))])
    inode = path.stat().st_ino
    tensorfile.write(path, [Entry.of("w", torch.full((1000,), 2.0))])
    assert path.stat().st_ino == inode
    assert load_file(path)["w"].sum() == 2000


def test_values_are_cast_to_the_entry_s_type(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorfile.write(path, [Entry("w", torch.bfloat16, (2,), lambda: torch.tensor([1.0, 2.5]))])
    assert torch.equal(load_file(path)["w"], torch.tensor([1.0, 2.5]).bfloat16())


def test_ranks_without_a_path_only_fetch() -> None:
    fetched = []
    entries = [
        Entry(name, torch.float32, (1,), lambda name=name: fetched.append(name) or torch.ones(1)) for name in "ba"
    ]
    tensorfile.write(None, entries)
    assert fetched == ["a", "b"]
