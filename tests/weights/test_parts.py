"""Tensors in the files of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tqppo.errors import CheckpointError
from tqppo.space import Digest
from tqppo.weights import file as tensorfile
from tqppo.weights import parts
from tqppo.weights.file import Entry
from tqppo.weights.parts import Parts

TENSOR = torch.arange(28.0).view(7, 4)


def write(folder: Path, cuts: list[slice]) -> None:
    """Rows of a tensor as ranks would have saved them, and a number that the first of them saved."""
    for rank, cut in enumerate(cuts):
        entries = [Entry.of("w", TENSOR[cut])] if len(TENSOR[cut]) else []
        entries += [Entry.of("step.w", torch.tensor(3.0))] if rank == 0 else []
        name = f"model-{rank + 1:05d}-of-{len(cuts):05d}.safetensors"
        tensorfile.write_hashed(folder / name, entries, {parts.BEGINS: json.dumps({"w": cut.start})})


def test_rows_are_read_over_the_borders_of_parts(tmp_path: Path) -> None:
    write(tmp_path, [slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 7)])
    found = Parts.open(tmp_path, "model")
    assert torch.equal(found.whole("w"), TENSOR)
    assert torch.equal(found._rows("w", 2, 5, TENSOR.shape), TENSOR[2:7])
    assert found._rows("w", 0, 0, TENSOR.shape).shape == (0, 4)
    assert found.whole("step.w") == 3.0
    assert found.whole("step.w").shape == ()


def test_a_single_rank_writes_one_plain_file_and_its_hash(tmp_path: Path) -> None:
    written = parts.part_of("model", {"w": TENSOR, "n": torch.tensor(2)}).write(tmp_path)
    assert written == {"model.safetensors": Digest.of(tmp_path / "model.safetensors")}
    tensorfile.write(tmp_path / "plain", [Entry.of("w", TENSOR), Entry.of("n", torch.tensor(2))])
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert torch.equal(Parts.open(tmp_path, "model").like("w", torch.zeros(7, 4)), TENSOR)


def test_what_every_rank_has_whole_is_written_by_the_first(tmp_path: Path) -> None:
    for rank in range(2):
        parts.part_of("model", {"n": torch.tensor(2)}, rank=rank, size=2).write(tmp_path)
    assert Parts.open(tmp_path, "model").whole("n") == 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, lost: int) -> None:
    write(tmp_path, [slice(0, 3), slice(3, 6), slice(6, 7)])
    sorted(tmp_path.iterdir())[lost].unlink()
    with pytest.raises(CheckpointError, match="does not have the part of every rank"):
        Parts.open(tmp_path, "model")


def test_no_part_at_all_and_a_damaged_one_are_errors_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no model\.safetensors"):
        Parts.open(tmp_path, "model")
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        Parts.open(tmp_path, "model")


@pytest.mark.parametrize(
    ("cuts", "shape", "said"),
    [
        ([slice(0, 3), slice(4, 7)], (7, 4), "lacks rows 3 to 4 of 'w'"),
        ([slice(0, 3), slice(2, 7)], (7, 4), "or has them twice"),
        ([slice(0, 3), slice(3, 6)], (7, 4), "has 6 rows of 'w', and the model 7"),
        ([slice(0, 7)], (7, 5), "has 'w' in another shape than the model"),
    ],
)
def test_rows_that_do_not_make_the_tensor_are_refused(
    tmp_path: Path, cuts: list[slice], shape: tuple[int, int], said: str
) -> None:
    write(tmp_path, cuts)
    with pytest.raises(CheckpointError, match=said):
        Parts.open(tmp_path, "model").like("w", torch.zeros(shape))
