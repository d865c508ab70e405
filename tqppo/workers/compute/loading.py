"""Opens a role's model: whole where one process holds it, and where ranks share it, each its own rows only.

A model that is going to be sharded is made without memory (on torch's meta device), sharded, and then filled from its
safetensors files, so that no rank ever holds more than its shard and one tensor.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import logging as transformers_logging
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from tqppo.errors import PreflightError
from tqppo.untrusted import loading
from tqppo.weights.file import Place, read_header
from tqppo.weights.shards import rows_of, sharded_like
from tqppo.workers.specs import ModelSpec

AutoClass = type[AutoModel] | type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]
MAX_LAYERS = 10_000  # of a config.json from elsewhere
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs and float32 on CPUs, most of which compute bfloat16 several times slower."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def attention_kernel(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def needs_sharding(dtype: torch.dtype) -> bool:
    """Whether FSDP holds the model: with several ranks, and also with one that computes in a smaller type."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    return size > 1 or dtype != torch.float32


def open_model(auto_class: AutoClass, spec: ModelSpec, device: torch.device, *, is_frozen: bool) -> PreTrainedModel:
    """A model without dropout. Parameters that learn are float32, frozen ones have the type of the computation.

    If it is going to be sharded its parameters have no memory yet; `fill` comes after sharding.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = compute_dtype(spec.dtype, device)
    kept = dtype if is_frozen else torch.float32
    with loading(f"model {spec.path!r}"):
        _check_depth(spec)
        is_sharded = dist.is_initialized() and needs_sharding(dtype)
        model = _without_memory(auto_class, spec, device, kept) if is_sharded else None
        if model is None:
            model = auto_class.from_pretrained(
                spec.path,
                dtype=kept,  # FSDP sets the type of the computation
                attn_implementation=attention_kernel(spec.attention, device),
                trust_remote_code=spec.trust_remote_code,
            )
    _drop_dropout(model)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints only in training mode; dropout is off by now
    else:
        model.eval()
    return model


def _check_depth(spec: ModelSpec) -> None:
    """Refuse a model that would be built for hours before its files turn out to be too small."""
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise PreflightError(f"model {spec.path!r}: its config.json has {layers} layers, more than {MAX_LAYERS:,}")


def _drop_dropout(model: nn.Module) -> None:
    """Turn dropout off: it would make the loss depend on the cut into micro-batches, and old log-probabilities off."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


# -- without memory ----------------------------------------------------------------------------------------------------


def _without_memory(
    auto_class: AutoClass, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel | None:
    """The model on the meta device; None if it cannot be filled from files, as where files have another layout."""
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    files = TensorFiles.find(spec.path)
    if files is None:
        return None
    model = _from_config(auto_class, config, spec, attention_kernel(spec.attention, device))
    if not files.have(model) or not _compute_buffers(model, device):
        return None
    if model.can_generate():
        model.generation_config = _generation_config(spec.path, config)
    for parameter in model.parameters():  # not the buffers, which stay as they were computed
        parameter.data = parameter.data.to(dtype)
    return model


def _from_config(auto_class: AutoClass, config: PretrainedConfig, spec: ModelSpec, attention: str) -> PreTrainedModel:
    make: Any = auto_class.from_config
    with torch.device("meta"):
        model: PreTrainedModel = make(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=spec.trust_remote_code
        )
    return model


def _generation_config(path: str, config: PretrainedConfig) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model without such a file
        return GenerationConfig.from_model_config(config)


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> bool:
    """Compute the tables of rotary embeddings, which no file has; false if there are buffers of another kind."""
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if names and not hasattr(module, "original_inv_freq"):
            return False
        for name in names:
            setattr(module, name, torch.empty_like(getattr(module, name), device=device))
        if names:
            initialise: Any = model._init_weights
            initialise(module)
    return True


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The tensors of a model in its safetensors files."""

    places: dict[str, tuple[Path, Place]]

    @classmethod
    def find(cls, path: str) -> TensorFiles | None:
        """Find the tensors of a folder or hub name. None if it has no safetensors files.

        Also None if a file is damaged or has an unknown dtype: `from_pretrained` loads it, or says what is wrong.
        """
        try:
            places = {name: (file, place) for file in _files(path) for name, place in _header(file).items()}
        except (KeyError, ValueError):
            return None
        return cls(places) if places else None

    def name_of(self, parameter: str) -> str:
        """A file's name of a model's parameter: models with and without a head put different prefixes before it."""
        if parameter in self.places:
            return parameter
        longer = [name for name in self.places if name.endswith(f".{parameter}")]
        shorter = parameter.partition(".")[2]
        return longer[0] if len(longer) == 1 else shorter if shorter in self.places else ""

    def have(self, model: nn.Module) -> bool:
        """Whether the files have every parameter in its shape; one of the names of a tied parameter suffices."""
        for names, parameter in _by_identity(model):
            found = [self.places[self.name_of(name)][1] for name in names if self.name_of(name)]
            if not found or tuple(found[0].shape) != tuple(parameter.shape):
                return False
        return True

    def rows(self, name: str, begin: int, count: int) -> Tensor:
        """Some rows of a tensor, read from its file without the rest of it."""
        file, place = self.places[name]
        return place.rows(file, begin, count)


def _files(path: str) -> list[Path]:
    single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return []
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [Path(str(cached_file(path, name))) for name in names]


def _header(file: Path) -> dict[str, Place]:
    with file.open("rb") as opened:
        return read_header(opened)[1]


def _by_identity(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Each parameter once, with all its names."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    yield from found.values()


@torch.no_grad()
def fill(model: nn.Module, path: str) -> None:
    """Give the parameters that have no memory their values from the model's files, each rank its own rows."""
    waiting = [(names, parameter) for names, parameter in _by_identity(model) if parameter.device.type == "meta"]
    if not waiting:
        return
    files = TensorFiles.find(path)
    assert files is not None, "a model without memory has files"
    state: dict[str, Tensor] = {}
    for names, parameter in waiting:
        known = [files.name_of(_name_in_model(name)) for name in names]
        value = _shard_of(files, next(name for name in known if name), parameter)
        state |= dict.fromkeys(names, nn.Parameter(value, requires_grad=parameter.requires_grad))
    model.load_state_dict(state, assign=True, strict=False)


def _name_in_model(name: str) -> str:
    """The name within the `transformers` model: without the role's own wrapper, and without LoRA's."""
    return name.partition(".")[2].replace(".base_layer.", ".")


def _shard_of(files: TensorFiles, name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's rows of a tensor, as FSDP shards it."""
    assert isinstance(parameter, DTensor), "a model without memory is sharded before it is filled"
    own = rows_of(parameter)
    return sharded_like(files.rows(name, own.begin, own.count), parameter)
