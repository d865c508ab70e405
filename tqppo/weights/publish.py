"""Publishes a policy's weights as a Hugging Face folder that engines load: adapters merged, shards gathered.

The actor owns the publisher; exports to disk use the same entries.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from tqppo.processes.reaper import Claim, claim
from tqppo.protocols import WeightSource
from tqppo.space import explained
from tqppo.weights import file as tensorfile
from tqppo.weights import location
from tqppo.weights.file import MODEL_FILE, Entry
from tqppo.weights.shards import whole

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")


def entries(causal_lm: PreTrainedModel, dtype: torch.dtype, *, is_writer: bool = True) -> list[Entry]:
    """Every weight under the name that `transformers` and the engines use; the output layer too when it is tied.

    Every rank must call this and then fetch what it returns, in the file's order. A rank that is not the writer takes
    part in gathering, and keeps nothing of it.
    """
    found = []
    for name, tensor in causal_lm.state_dict().items():
        if ".lora_" in name:
            continue
        module, _, suffix = name.rpartition(".base_layer.")
        published_as = dtype if tensor.is_floating_point() else tensor.dtype
        fetch: Callable[[], Tensor] = partial(whole, tensor, published_as)
        if module and suffix == "weight":
            fetch = partial(_merged, causal_lm.get_submodule(module))
        found.append(Entry(name.replace(".base_layer.", "."), published_as, tuple(tensor.shape), fetch))
    if not _is_converted(causal_lm):
        return found
    if is_writer:
        return _as_on_disk(causal_lm, found)
    for entry in found:
        entry.fetch()
    return []


def _is_converted(causal_lm: PreTrainedModel) -> bool:
    """Whether checkpoints of this model store weights in another form than it computes with, such as MoE experts."""
    return any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(causal_lm))


def _as_on_disk(causal_lm: PreTrainedModel, found: list[Entry]) -> list[Entry]:
    """The entries in the form of a checkpoint. The result holds a full copy of the weights."""
    state = {entry.name: entry.fetch().to("cpu", entry.dtype) for entry in found}
    return [Entry.of(name, tensor) for name, tensor in revert_weight_conversion(causal_lm, state).items()]


def _merged(layer: Any) -> Tensor:
    """The weight of a LoRA layer with its adapter merged in; the layer itself does not change."""
    weight = whole(layer.base_layer.weight)
    a, b = whole(layer.lora_A["default"].weight), whole(layer.lora_B["default"].weight)
    delta: Tensor = (b @ a) * layer.scaling["default"]
    return weight + (delta.T if layer.fan_in_fan_out else delta)


class Publisher:
    """The newest published versions, each in its own folder. It stays unchanged until `num_versions` later ones exist.

    The oldest folder becomes the draft of the next version and its pages are reused, so that publishing allocates
    nothing after the first versions.
    """

    def __init__(self, root: str, model_path: str, *, with_checksums: bool = False, num_versions: int = 2) -> None:
        self._root = Path(root) if root else location.new_folder()
        self._model_path = model_path
        self._with_checksums, self._num_versions = with_checksums, num_versions
        self._claim: Claim | None = None
        self._folders: list[Path] = []

    def publish(self, causal_lm: PreTrainedModel, dtype: torch.dtype, version: int, *, is_writer: bool) -> WeightSource:
        """Write the weights; every rank calls this, and the one that is the writer returns their folder."""
        if not is_writer:
            tensorfile.write(None, entries(causal_lm, dtype, is_writer=False))
            return WeightSource("", version)
        draft = self._draft(causal_lm, dtype)
        found = entries(causal_lm, dtype)
        to = draft / MODEL_FILE
        checksums = tensorfile.write(to, found, with_checksums=self._with_checksums, is_private=True)
        folder = draft.with_name(f"v{version}")
        if folder in self._folders:  # the same version again, after a resume within one process
            self._folders.remove(folder)
            shutil.rmtree(folder)
        os.rename(draft, folder)
        self._folders.append(folder)
        return WeightSource(str(folder), version, checksums=checksums)

    def _draft(self, causal_lm: PreTrainedModel, dtype: torch.dtype) -> Path:
        if self._claim is None:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._claim = claim(self._root)
        draft = self._root / "draft"
        if len(self._folders) >= self._num_versions:
            os.rename(self._folders.pop(0), draft)
        elif not draft.exists():
            draft.mkdir(mode=0o700)
            save_description(causal_lm, self._model_path, draft, dtype)
        return draft

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim, self._folders = None, []


def save_description(causal_lm: PreTrainedModel, model_path: str, folder: Path, dtype: torch.dtype) -> None:
    """Write the config and copy the tokenizer, which together with the weights make the folder a model."""
    tokenizer_files = [file for pattern in _TOKENIZER_FILES for file in Path(model_path).glob(pattern)]
    described = causal_lm.config.__class__.from_dict(causal_lm.config.to_dict())
    described.dtype = dtype
    described.architectures = [type(causal_lm).__name__]
    with explained(folder, sum(file.stat().st_size for file in tokenizer_files)):
        described.save_pretrained(folder)
        if causal_lm.can_generate() and getattr(causal_lm, "generation_config", None) is not None:
            causal_lm.generation_config.save_pretrained(folder)
        for file in tokenizer_files:
            shutil.copy(file, folder)


def export(folder: Path | None, found: list[Entry]) -> None:
    """Write the weights into a folder; a rank without a folder only takes part in gathering them."""
    tensorfile.write(None if folder is None else folder / MODEL_FILE, found)
