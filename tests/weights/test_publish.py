"""What is published is the model: `transformers` loads the folder and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tqppo.weights import location, publish
from tqppo.weights.publish import Publisher, entries, export, save_description


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    return loaded


@pytest.fixture
def publisher(tmp_path: Path, tiny_model: Path) -> Iterator[Publisher]:
    made = Publisher(str(tmp_path / "weights"), str(tiny_model))
    yield made
    made.close()


def test_a_published_folder_is_a_model_that_computes_the_same(publisher: Publisher, model: PreTrainedModel) -> None:
    source = publisher.publish(model, torch.float32, 1, is_writer=True)
    loaded = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"


def test_the_newest_two_versions_stay_and_the_third_lends_its_pages(
    publisher: Publisher, model: PreTrainedModel
) -> None:
    files = []
    for version in (1, 2, 3):
        folder = Path(publisher.publish(model, torch.float32, version, is_writer=True).folder)
        files.append(folder / "model.safetensors")
        if version == 1:
            inode = files[0].stat().st_ino
    assert [file.exists() for file in files] == [False, True, True]
    assert files[2].stat().st_ino == inode


def test_as_many_versions_stay_as_engines_have_yet_to_load(
    tmp_path: Path, tiny_model: Path, model: PreTrainedModel
) -> None:
    publisher = Publisher(str(tmp_path / "weights"), str(tiny_model), num_versions=3)
    folders = [Path(publisher.publish(model, torch.float32, version, is_writer=True).folder) for version in range(1, 6)]
    assert [folder.exists() for folder in folders] == [False, False, True, True, True]
    publisher.close()


def test_only_this_user_can_read_what_is_published(publisher: Publisher, model: PreTrainedModel) -> None:
    folder = Path(publisher.publish(model, torch.float32, 1, is_writer=True).folder)
    modes = [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "model.safetensors")]
    assert modes == [0o700, 0o700, 0o600]


def test_a_version_can_be_published_twice(publisher: Publisher, model: PreTrainedModel) -> None:
    first = publisher.publish(model, torch.float32, 1, is_writer=True)
    assert publisher.publish(model, torch.float32, 1, is_writer=True) == first


def test_floats_are_published_in_the_type_asked_for(publisher: Publisher, model: PreTrainedModel) -> None:
    source = publisher.publish(model, torch.bfloat16, 1, is_writer=True)
    published = load_file(Path(source.folder, "model.safetensors"))
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}


def test_ranks_that_do_not_write_leave_no_folder(publisher: Publisher, model: PreTrainedModel, tmp_path: Path) -> None:
    assert publisher.publish(model, torch.float32, 4, is_writer=False).folder == ""
    assert not (tmp_path / "weights").exists()


def test_without_a_folder_shared_memory_is_used_and_given_back(tiny_model: Path, model: PreTrainedModel) -> None:
    publisher = Publisher("", str(tiny_model))
    folder = Path(publisher.publish(model, torch.float32, 1, is_writer=True).folder)
    assert folder.is_relative_to(location.parent())
    publisher.close()
    publisher.close()
    assert not folder.parent.exists()


def test_an_export_on_disk_is_a_model_too(tmp_path: Path, tiny_model: Path, model: PreTrainedModel) -> None:
    save_description(model, str(tiny_model), tmp_path, torch.float32)
    export(tmp_path, entries(model, torch.float32))
    export(None, entries(model, torch.float32))
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_of_a_mixture_of_experts_only_the_writer_keeps_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    experts = Qwen3MoeForCausalLM(config)
    fetched: list[torch.Tensor] = []

    def counted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        fetched.append(tensor)
        return tensor.detach().to(dtype)

    monkeypatch.setattr(publish, "whole", counted)
    written = entries(experts, torch.bfloat16)
    in_writer = [tensor.data_ptr() for tensor in fetched]
    assert sum(".experts." in entry.name for entry in written) == 4 * 3, "as on disk: one tensor per expert"
    assert len(fetched) == len(experts.state_dict()), "all were gathered when the entries were made"
    fetched.clear()
    assert entries(experts, torch.bfloat16, is_writer=False) == []
    assert [tensor.data_ptr() for tensor in fetched] == in_writer, "in the writer's order"
