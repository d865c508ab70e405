"""Shapes of models from config.json files, from the hub's cache and from names; parameters by published counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tqppo.config.plan.model_shape import ModelShape
from tqppo.config.plan.shapes import cached_folder, from_json, shape_of

MIXTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
QWEN_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("values", "billions", "width"),
    [
        (MIXTRAL, 46.70, 2 * 14336),
        (QWEN_MOE, 30.53, 8 * 768),
        (DEEPSEEK_V2_LITE, 15.71, (6 + 2) * 1408),
        (DEEPSEEK_V3, 671.0, (8 + 1) * 2048),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"],
)
def test_a_mixture_has_the_published_number_of_parameters(
    values: dict[str, object], billions: float, width: int
) -> None:
    shape = from_json(values)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active_intermediate == width


def test_a_mixture_is_larger_than_the_dense_model_of_its_names() -> None:
    mixture, dense = from_json(MIXTRAL), from_json({k: v for k, v in MIXTRAL.items() if "experts" not in k})
    assert mixture is not None
    assert dense is not None
    assert mixture.parameters > 6 * dense.parameters
    assert mixture.cached_numbers == dense.cached_numbers  # experts have no keys and values


def test_latent_attention_caches_the_narrow_form() -> None:
    shape = from_json(DEEPSEEK_V2_LITE)
    assert shape is not None
    assert shape.cached_numbers == 27 * (512 + 64)


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen3-30B-A3B"])
def test_known_mixtures_are_not_planned_as_dense_models(name: str) -> None:
    shape = shape_of(name)
    assert shape is not None
    assert shape.experts is not None
    assert shape.active_intermediate < shape.experts.count * shape.experts.intermediate


def test_a_hub_name_in_the_local_cache_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert shape_of("acme/new-model") is None
    repository = tmp_path / "models--acme--new-model"
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    assert shape_of("acme/new-model") is None  # nothing says which snapshot is current
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    found = shape_of("acme/new-model")
    assert isinstance(found, ModelShape)
    assert found.source == "config.json"
    assert cached_folder("acme/new-model") == folder


def test_the_cache_is_where_hugging_face_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("1\n")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cached_folder("a/b") == folder
    assert cached_folder("../b") is None


def test_negative_sizes_and_more_dense_layers_than_layers_give_no_negative_model() -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "intermediate_size": 8,
    }
    assert from_json(sizes | {"vocab_size": -10}) is None
    mixed = from_json(sizes | {"num_experts": 4, "first_k_dense_replace": 9, "head_dim": -3})
    assert mixed is not None
    assert mixed.experts is not None
    assert mixed.experts.dense_layers == 2
    assert mixed.head_size == 4
