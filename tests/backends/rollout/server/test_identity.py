"""The genuine servers in bfloat16: a sync does not end the run, and one flipped weight or a missed update does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tqppo.contracts.rollout import Subject, event_loop_of_run, open_subject, prompts, publish_head  # noqa: F401
from tqppo.errors import EngineError
from tqppo.protocols import WeightSource
from tqppo.run.compose import ROUGH_SYNC_TOLERANCE
from tqppo.tiny.model import write_tiny_model
from tqppo.weights.checksum import checksum
from tqppo.weights.identity import check_identity
from tqppo.weights.verify import Probe, verify_logprobs

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]
CHANGED = {  # a weight whose bits each server can show on a CPU, and the name that its parameter has there
    "vllm": ("model.norm.weight", "model.norm.weight"),
    "sglang": ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def half(
    request: pytest.FixtureRequest,
    event_loop_of_run: asyncio.AbstractEventLoop,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    folder = write_tiny_model(tmp_path_factory.mktemp("half"), seed=1)
    options = {"dtype": "bfloat16", "scores_hidden": False}
    yield from open_subject(request.param, folder, event_loop_of_run, options, tmp_path_factory.mktemp("logs"))


def published(folder: Path, version: int, *, step: float = 0.0) -> WeightSource:
    """A model in bfloat16 as the actor publishes it; with a step, after an update of every weight by so much."""
    write_tiny_model(folder, seed=7)
    publish_head(folder)
    file = folder / "model.safetensors"
    tensors = {name: (tensor + step).bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return WeightSource(str(folder), version, checksums={name: checksum(each) for name, each in tensors.items()})


def test_a_sync_in_bfloat16_is_verified_and_goes_on(half: Subject, tmp_path: Path) -> None:
    source = published(tmp_path, 1)
    half.run(half.engine.load_weights(source))  # compares the checksums
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = prompts(1, longest=60, seed=4)[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    expected = logprobs[range(len(tokens) - 1), tokens[1:]].tolist()
    worst = half.run(verify_logprobs(half.engine, Probe(tokens, expected, ROUGH_SYNC_TOLERANCE)))
    assert 0 < worst < 0.1, "bfloat16 rounds differently, but not much"


def test_one_flipped_weight_is_found(half: Subject, tmp_path: Path) -> None:
    engine: Any = half.engine
    changed, shown = CHANGED[engine.api.backend]
    source = published(tmp_path, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[changed].view(torch.int16).view(-1)[1] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    server = half.run(engine.servers.live())
    engine.loader.source = source
    with pytest.raises(EngineError, match=rf"does not have the weights that were published: .*{shown}"):
        half.run(engine.loader.restore(server))
    half.run(engine.load_weights(published(tmp_path / "whole", 3)))


def test_a_missed_update_is_found(half: Subject, tmp_path: Path) -> None:
    """The weights of the version before, which differ by what one step at a usual learning rate changes."""
    engine: Any = half.engine
    half.run(engine.load_weights(published(tmp_path / "old", 4)))
    newer = published(tmp_path / "new", 5, step=1e-4)
    reports = half.run(engine.api.weight_reports(half.run(engine.servers.live())))
    assert check_identity("rollout-0", published(tmp_path / "same", 4).checksums, reports) > 0
    with pytest.raises(EngineError, match="does not have the weights that were published"):
        check_identity("rollout-0", newer.checksums, reports)
