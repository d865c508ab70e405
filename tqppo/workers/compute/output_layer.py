"""The output layer of a model that runs elsewhere: from its last hidden states to logits.

A teacher sends hidden states, a few thousand numbers per token, instead of logits; this layer makes logits of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from tqppo.errors import PreflightError
from tqppo.untrusted import loading
from tqppo.weights import file as tensorfile
from tqppo.workers.compute.model import LogitTransform


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The weight [V, H] and bias [V] of an output layer, and what the architecture does with its result."""

    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H], after the model's last normalisation → [N, V] in float32. Zeros beyond H are cut off."""
        inputs = hidden[:, : self.weight.shape[1]].to(self.weight.device, self.weight.dtype)
        return self.transform(functional.linear(inputs, self.weight, self.bias)).float()


def load_output_layer(
    path: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> OutputLayer:
    """Read the output layer of a model, a Hugging Face folder or hub name, and nothing else of its weights."""
    with loading(f"the output layer of {path!r}"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        files = _files(path)
        weights, biases = _names(config, trust_remote_code)
        weight = _read(path, files, weights)
        if weight is None:
            raise PreflightError(f"{path!r} has no output layer among its weights: none of {', '.join(weights)}")
        bias = _read(path, files, biases)
    to_device = None if bias is None else bias.to(device, dtype)
    return OutputLayer(weight.to(device, dtype), to_device, LogitTransform.of(config))


def _names(config: PretrainedConfig, trust_remote_code: bool) -> tuple[list[str], list[str]]:
    """Names under which the files may have the layer's weight, and its bias. Tied weights have the embedding's name."""
    with torch.device("meta"):  # a model without memory, which knows its names
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=trust_remote_code
        )
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [f"{names[id(head)]}.weight"]
    if head.weight is embedding.weight:
        weights.append(f"{names[id(embedding)]}.weight")
    return weights, [] if head.bias is None else [f"{names[id(head)]}.bias"]


def _files(path: str) -> dict[str, str]:
    """The name of the safetensors file of each tensor of a model, by the tensor's name."""
    single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return dict.fromkeys(tensorfile.names(Path(single)), SAFE_WEIGHTS_NAME)
    located: dict[str, str] = json.loads(_located(path, SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"]
    return located


def _located(path: str, name: str) -> Path:
    found = cached_file(path, name)
    assert found is not None, "a missing file is an OSError"
    return Path(found)


def _read(path: str, files: dict[str, str], wanted: list[str]) -> Tensor | None:
    """The first of the wanted tensors. A file may put another prefix before a name, so its last two parts count."""
    for name in wanted:
        end = ".".join(name.split(".")[-2:])
        matches = [name] if name in files else [each for each in files if each == end or each.endswith(f".{end}")]
        if len(matches) == 1:
            with tensorfile.reading(_located(path, files[matches[0]])) as read:
                return read(matches[0])
    return None
