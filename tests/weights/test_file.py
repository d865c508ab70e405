from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from disks import files_of_at_most
from safetensors.torch import load_file

from tqppo.errors import OutOfSpace
from tqppo.weights import file as tensorfile
from tqppo.weights.file import Entry, MappedFile


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


def test_a_mapped_file_gives_its_tensors_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "half": torch.randn(4).bfloat16(),
        "none": torch.zeros(0, 2),
        "n": torch.tensor(3),
    }
    tensorfile.write(tmp_path / "x", [Entry.of(name, tensor) for name, tensor in tensors.items()])
    mapped = MappedFile.open(tmp_path / "x")
    assert [place.begin for place in mapped.places.values()] == sorted(place.begin for place in mapped.places.values())
    for name, tensor in tensors.items():
        assert torch.equal(mapped.tensor(name), tensor)
    with tensorfile.reading(tmp_path / "x") as read:
        assert all(torch.equal(read(name), tensors[name]) for name in tensorfile.names(tmp_path / "x"))


def test_a_mapped_tensor_outlives_the_file_s_name_and_follows_its_content(tmp_path: Path) -> None:
    tensorfile.write(tmp_path / "x", [Entry.of("w", torch.ones(3))])
    tensor = MappedFile.open(tmp_path / "x").tensor("w")
    tensorfile.write(tmp_path / "x", [Entry.of("w", torch.full((3,), 2.0))])
    (tmp_path / "x").unlink()
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("content", [b"", b"\x02" + bytes(7) + b"{", b"\x02" + bytes(7) + b"[]", b"\xff" * 16])
def test_other_files_are_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 (json's own message is fine)
        MappedFile.open(tmp_path / "x")


def test_a_file_that_was_cut_short_is_a_value_error(tmp_path: Path) -> None:
    tensorfile.write(tmp_path / "x", [Entry.of("w", torch.ones(3))])
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter"):
        MappedFile.open(tmp_path / "x")


def test_a_rank_without_room_still_takes_part_in_every_collective(tmp_path: Path) -> None:
    """The other ranks wait for each fetch: an error before the last one would leave them waiting."""
    fetched: list[str] = []

    def entry(name: str) -> Entry:
        return Entry(name, torch.float32, (1000,), lambda: (fetched.append(name), torch.ones(1000))[1])

    with files_of_at_most(100), pytest.raises(OutOfSpace, match="has no room for"):
        tensorfile.write(tmp_path / "x.safetensors", [entry("a"), entry("b")])
    assert fetched == ["a", "b"]
    with files_of_at_most(100), tensorfile.deferring() as problems:
        tensorfile.write(tmp_path / "x.safetensors", [entry("c")])
        tensorfile.write(tmp_path / "y.safetensors", [entry("d")])
        tensorfile.write_beside(tmp_path / "state.json", b"x" * 200)
    assert len(problems) == 3
    assert not (tmp_path / "state.json").exists()
    assert fetched == ["a", "b", "c", "d"]
    tensorfile.write(tmp_path / "x.safetensors", [entry("e")])  # what fits is written again
    assert load_file(tmp_path / "x.safetensors")["e"].sum() == 1000


@pytest.mark.parametrize(
    "wrong", [{"shape": [2, 7]}, {"shape": [2.0, 3]}, {"shape": [-2, -3]}, {"shape": 6}, {"data_offsets": [0, 20]}]
)
def test_a_header_whose_shapes_do_not_fit_its_bytes_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | wrong}).encode()
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ValueError, match="another number of bytes"):
        MappedFile.open(tmp_path / "w")
