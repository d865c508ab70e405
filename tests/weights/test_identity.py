"""An engine's weights against the published ones, whole, joined and split."""

from __future__ import annotations

import pytest
import torch

from tqppo.errors import EngineError
from tqppo.weights.checksum import checksum
from tqppo.weights.identity import WeightReport, check_identity

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def published() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    layers = {f"layer.{name}.weight": torch.randn(4, 4, generator=made) for name in PARTS["qkv_proj"]}
    return {**layers, "norm.weight": torch.ones(4), "embed.weight": torch.randn(6, 4, generator=made)}


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As an engine holds them: one matrix for queries, keys and values, padded embeddings, a table of its own."""
    return {
        "layer.qkv_proj.weight": torch.cat([tensors[f"layer.{name}.weight"] for name in PARTS["qkv_proj"]]),
        "norm.weight": tensors["norm.weight"],
        "embed.weight": torch.cat([tensors["embed.weight"], torch.zeros(2, 4)]),
        "rotary.table": torch.rand(3),
    }


def test_the_same_weights_pass_on_one_process_and_split_over_two() -> None:
    tensors = published()
    held = joined(tensors)
    assert check_identity("e", sums(tensors), [WeightReport(sums(held), sums(tensors), PARTS)]) == 3
    halves = [{n: t if n == "norm.weight" else t.chunk(2, 0)[i] for n, t in held.items()} for i in range(2)]
    assert check_identity("e", sums(tensors), [WeightReport(sums(half), None, PARTS) for half in halves]) == 3


def test_a_flipped_weight_is_named() -> None:
    tensors = published()
    wrong = {name: tensor.clone() for name, tensor in tensors.items()}
    wrong["layer.k_proj.weight"].view(torch.int32)[1, 1] ^= 1
    with pytest.raises(EngineError, match=r"layer\.qkv_proj\.weight of 5 tensors differ"):
        check_identity("e", sums(tensors), [WeightReport(sums(joined(wrong)), None, PARTS)])


def test_a_tensor_that_never_came_is_named() -> None:
    tensors = published()
    given = {name: each for name, each in sums(tensors).items() if name != "norm.weight"}
    with pytest.raises(EngineError, match=r"norm\.weight of 5"):
        check_identity("e", sums(tensors), [WeightReport({}, given)])


def test_another_type_cannot_be_compared() -> None:
    tensors = published()
    held = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert check_identity("e", sums(tensors), [WeightReport(sums(held))]) == 0
