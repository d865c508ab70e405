"""Weights of another node, copied file by file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tqppo.protocols import WeightSource
from tqppo.weights.copy import Copies
from tqppo.weights.send import Sender, SenderClient


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({f"layer.{i}": torch.randn(8, i + 1) for i in range(10)}, folder / "model.safetensors")
    (folder / "empty.txt").touch()
    return folder


def test_copies_are_the_published_files_and_the_newest_two_stay(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqppo.weights.copy.PIECE_BYTES", 300)
    copies, client = Copies(), SenderClient(Sender())
    sources = []
    for version in (1, 2, 3):
        (published / "config.json").write_text(json.dumps({"version": version}))
        source = asyncio.run(copies.fetch(WeightSource(str(published), version, "elsewhere", client), client))
        assert (source.version, source.node, source.sender) == (version, "", None)
        for file in published.iterdir():
            assert (Path(source.folder) / file.name).read_bytes() == file.read_bytes()
        assert Path(source.folder).stat().st_mode & 0o777 == 0o700
        assert (Path(source.folder) / "model.safetensors").stat().st_mode & 0o777 == 0o600
        sources.append(source)
    assert [Path(each.folder).exists() for each in sources] == [False, True, True]
    copies.close()
    copies.close()
    assert not Path(sources[-1].folder).parent.exists()
