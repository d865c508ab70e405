"""A real vLLM: the contract of every engine, and faults. Llama-style with a tied head, Qwen2-style without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.backends.rollout.server.real_servers import *  # noqa: F403
from tqppo.contracts.rollout import *  # noqa: F403
from tqppo.contracts.rollout_subject import Subject
from tqppo.errors import EngineError
from tqppo.protocols import WeightSource
from tqppo.weights.checksum import checksum

from tests.backends.rollout.server.real_servers import sender, subject, untied_subject  # noqa: F401  isort: skip  (they replace the suite's own)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "vllm"


@pytest.fixture(scope="session")
def untied_model() -> dict[str, Any]:
    return {"family": "qwen2"}


@pytest.fixture(scope="session")
def control_route() -> str:
    return "/weight_info"


def test_a_flipped_weight_and_a_missed_update_are_named(subject: Subject, tmp_path: Path) -> None:  # noqa: F811
    """vLLM says by checksums what came and what it holds; one bit of one weight, at lr 1e-6, is enough."""
    engine: Any = subject.engine
    model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    subject.run(engine.load_weights(WeightSource(str(tmp_path), 50, checksums=checksums)))
    reports = subject.run(engine.api.weight_reports(subject.run(engine.servers.live())))
    assert reports[0].given == checksums
    assert reports[0].held, "embeddings and norms can be read back on a CPU too"
    tensors["model.norm.weight"].view(torch.int32)[1] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    server = subject.run(engine.servers.live())
    engine.loader.source = WeightSource(str(tmp_path), 51, checksums=checksums)
    with pytest.raises(EngineError, match=r"does not have the weights that were published: model\.norm\.weight"):
        subject.run(engine.loader.restore(server))
    subject.run(engine.load_weights(WeightSource(str(subject.folder), 52)))
