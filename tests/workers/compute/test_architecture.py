"""Attention kernels that need a GPU: a worker starts with them, and packs its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tqppo.errors import PreflightError
from tqppo.workers.compute import architecture
from tqppo.workers.compute.loading import attention_kernel
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import FlatRows, MicroBatchCut, build
from tqppo.workers.compute.model import check_head, layout_for, load_policy, load_value_model
from tqppo.workers.compute.shared_prompts import attention_pairs_per_token
from tqppo.workers.specs import ModelSpec

CPU = torch.device("cpu")
STUB = "needs_a_gpu"


def refuses(module: torch.nn.Module, query: Tensor, *rest: Any, **options: Any) -> Any:
    """A kernel like flash-attn's: half precision on a GPU, or an error."""
    if query.dtype == torch.float32 or query.device.type == "cpu":
        raise RuntimeError(f"this kernel takes no {query.dtype} on a {query.device.type}")
    return sdpa_attention_forward(module, query, *rest, **options)


@pytest.fixture(autouse=True, scope="module")
def stub_kernel() -> None:
    AttentionInterface.register(STUB, refuses)


def test_a_policy_loads_with_a_kernel_that_needs_a_gpu(tiny_model: Path, rows: dict[str, Any]) -> None:
    model = load_policy(ModelSpec(str(tiny_model), attention=STUB), CPU)
    flat = FlatRows.of(rows)
    with pytest.raises(RuntimeError, match="takes no torch"):  # the kernel is in place
        model(build(flat, MicroBatchCut.apart(torch.tensor([0]))), Scoring(1.0))


def test_sharing_of_prompts_is_tried_without_the_kernel(tiny_model: Path) -> None:
    model = load_value_model(ModelSpec(str(tiny_model), attention=STUB), CPU)
    assert attention_pairs_per_token(model, CPU) == 6 * 64


def test_a_head_that_does_more_is_refused_by_its_clone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("llama", vocab_size=40, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    check_head(model, "plain")

    class Louder(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            found = super().forward(*args, **options)
            found.logits = found.logits * 3
            return found

    with pytest.raises(PreflightError, match="'louder': Louder does something after its output layer"):
        check_head(Louder(config), "louder")


def test_a_clone_of_a_large_model_is_small() -> None:
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=2048,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=14336,
        vocab_size=32000,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = architecture.clone(model)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters()) / 500
    assert small(input_ids=torch.arange(3)[None]).logits.shape == (1, 3, architecture.VOCABULARY)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")  # transformers passes it
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # parts of torch use it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # that is what is tested
def test_flex_attention_packs_and_computes_what_trimmed_rows_do(tiny_model: Path, rows: dict[str, Any]) -> None:
    flat = FlatRows.of(rows)
    everyone = MicroBatchCut.apart(torch.arange(len(flat)))
    plain = load_policy(ModelSpec(str(tiny_model)), CPU)
    flex = load_policy(ModelSpec(str(tiny_model), attention="flex_attention"), CPU)
    assert layout_for(attention_kernel("flex_attention", CPU)) == "packed"
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trimmed, _, _ = plain(build(flat, everyone), Scoring(1.0))
        packed, _, _ = flex(build(flat, everyone, layout="packed"), Scoring(1.0))
    torch.testing.assert_close(packed, trimmed, atol=1e-5, rtol=1e-4)
