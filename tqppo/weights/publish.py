"""A policy's weights under the names that `transformers` and the engines know, adapters merged, shards made whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from tqppo.protocols import WeightSource
from tqppo.weights import file as tensorfile
from tqppo.weights.file import Entry
from tqppo.workers.compute.model import PolicyModel
from tqppo.workers.compute.shards import whole

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")


def entries(model: PolicyModel, dtype: torch.dtype) -> list[Entry]:
    """Every weight, the output layer too when it is tied to the embedding."""
    causal_lm: Any = model.causal_lm
    found = []
    for name, tensor in causal_lm.state_dict().items():
        if ".lora_" in name:
            continue
        module, _, suffix = name.rpartition(".base_layer.")
        fetch: Callable[[], Tensor] = partial(whole, tensor)
        if module and suffix == "weight":
            fetch = partial(_merged, causal_lm.get_submodule(module))
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        found.append(Entry(name.replace(".base_layer.", "."), kept, tuple(tensor.shape), fetch))
    return _as_on_disk(causal_lm, found) if _is_converted(causal_lm) else found


def _is_converted(causal_lm: Any) -> bool:
    """Whether `transformers` stores weights in another form than it computes with, as for the experts of an MoE."""
    return any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(causal_lm))


def _as_on_disk(causal_lm: Any, found: list[Entry]) -> list[Entry]:
    """The form that checkpoints and engines know; takes a whole copy of the weights while it lasts."""
    state = {entry.name: entry.fetch().to("cpu", entry.dtype) for entry in found}
    return [Entry.of(name, tensor) for name, tensor in revert_weight_conversion(causal_lm, state).items()]


def _merged(layer: Any) -> Tensor:
    """The weight of a LoRA layer with its adapter in it; the layer itself stays as it is."""
    weight = whole(layer.base_layer.weight)
    a, b = whole(layer.lora_A["default"].weight), whole(layer.lora_B["default"].weight)
    delta = (b @ a) * layer.scaling["default"]
    return weight + (delta.T if layer.fan_in_fan_out else delta)


class Publisher:
    """Folders of published weights, newest two kept: a source stays as it is until two later ones are out.

    The pages of the folder before those are written again, so publishing allocates nothing.
    """

    def __init__(self, root: str, model_path: str) -> None:
        self._given_root = root
        self._model_path = model_path
        self._root: Path | None = None
        self._folders: list[Path] = []

    def publish(self, model: PolicyModel, dtype: torch.dtype, version: int, *, is_writer: bool) -> WeightSource:
        if not is_writer:
            tensorfile.write(None, entries(model, dtype))
            return WeightSource("", version)
        draft = self._draft(model, dtype)
        tensorfile.write(draft / "model.safetensors", entries(model, dtype))
        folder = draft.with_name(f"v{version}")
        if folder in self._folders:  # the same version again, after a resume within one process
            self._folders.remove(folder)
            shutil.rmtree(folder)
        os.rename(draft, folder)
        self._folders.append(folder)
        return WeightSource(str(folder), version)

    def _draft(self, model: PolicyModel, dtype: torch.dtype) -> Path:
        if self._root is None:
            self._root = Path(self._given_root or _shared_memory())
            self._root.mkdir(parents=True, exist_ok=True)
        draft = self._root / "draft"
        if len(self._folders) >= 2:
            os.rename(self._folders.pop(0), draft)
        elif not draft.exists():
            draft.mkdir()
            save_description(model, self._model_path, draft, dtype)
        return draft

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root, self._folders = None, []


def _shared_memory() -> str:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return tempfile.mkdtemp(prefix="tqppo-weights-", dir=folder)


def save_description(model: PolicyModel, model_path: str, folder: Path, dtype: torch.dtype) -> None:
    """Config and tokenizer: what makes a folder of weights a model."""
    config: Any = model.causal_lm.config
    described = config.__class__.from_dict(config.to_dict())
    described.dtype = dtype
    described.architectures = [type(model.causal_lm).__name__]
    described.save_pretrained(folder)
    if model.causal_lm.can_generate() and getattr(model.causal_lm, "generation_config", None) is not None:
        model.causal_lm.generation_config.save_pretrained(folder)
    for pattern in _TOKENIZER_FILES:
        for file in Path(model_path).glob(pattern):
            shutil.copy(file, folder)


def export(folder: Path | None, found: list[Entry]) -> None:
    """The weights into a folder on disk; only fetched, for the writer's sake, where `folder` is None."""
    tensorfile.write(None if folder is None else folder / "model.safetensors", found)
