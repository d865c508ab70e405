"""Publishes, copies and writes weights on a file system of 1 MiB. `test_space` runs it in its own mount namespace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo.errors import OutOfSpace
from tqppo.processes.reaper import claim
from tqppo.protocols import WeightSource
from tqppo.tiny.model import write_tiny_model
from tqppo.weights import copy, file
from tqppo.weights.file import Entry
from tqppo.weights.publish import Publisher
from tqppo.weights.send import Sender, SenderClient

MIB = 1 << 20


def refused(what: str, folder: Path, attempt: Callable[[], object]) -> None:
    print(what, flush=True)
    with pytest.raises(OutOfSpace, match=f"{folder}.*has no room for .*No space left on device; .* bytes are free"):
        attempt()


def main(full: Path, big: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(full)], check=True)
    large = [Entry.of("w", torch.ones(MIB))]  # 4 MiB
    refused("write", full, lambda: file.write(full / "x.safetensors", large))
    assert (full / "x.safetensors").stat().st_size == 0
    file.write(full / "x.safetensors", [Entry.of("w", torch.ones(MIB // 8))])  # what fits is written afterwards
    assert float(file.MappedFile.open(full / "x.safetensors").tensor("w").sum()) == MIB // 8
    (full / "x.safetensors").unlink()

    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(big / "model", hidden_size=128))
    publisher = Publisher(str(full / "published"), str(big / "model"))
    refused("publish", full, lambda: publisher.publish(model, torch.float32, 1, is_writer=True))
    publisher.close()

    source = Publisher(str(big / "published"), str(big / "model")).publish(model, torch.float32, 1, is_writer=True)
    claimed = claim(full / "copies")
    copies, client = copy.Copies(), SenderClient(Sender())
    copies._claim = claimed
    away = WeightSource(source.folder, 1, "elsewhere", client)
    refused("copy", full, lambda: asyncio.run(copies.fetch(away, client)))
    print("all refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
