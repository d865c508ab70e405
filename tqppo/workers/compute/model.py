"""The workers' models: loaded from `transformers`, sharded with FSDP2, with a head per role.

Each head computes only the positions that matter: response tokens for policies and critics, the last token for reward
models.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from tqppo.algorithms.chunks import PerToken
from tqppo.errors import PreflightError
from tqppo.untrusted import loading
from tqppo.workers.compute import architecture, shared_prompts
from tqppo.workers.compute.context import ContextGroup, share
from tqppo.workers.compute.loading import needs_sharding, open_model
from tqppo.workers.compute.logprobs import Measure, measure_tokens
from tqppo.workers.compute.microbatch import MicroBatch
from tqppo.workers.specs import ModelSpec


def layout_for(attention: str) -> str:
    """Packing pays only where the kernel skips the blocks between rows; elsewhere trimmed batches are faster."""
    return "packed" if attention.startswith("fl") else "trimmed"  # flash or flex attention


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The scaling and capping that some architectures apply after their output layer."""

    scale: float
    softcap: float | None

    @staticmethod
    def of(config: PretrainedConfig) -> LogitTransform:
        config = config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class PolicyModel(nn.Module):
    """A causal language model that returns measures of chosen tokens instead of all logits."""

    context: ContextGroup | None = None

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.vocabulary = int(causal_lm.config.get_text_config().vocab_size)
        self._transform = LogitTransform.of(causal_lm.config)

    def forward(self, micro: MicroBatch, measure: Measure) -> PerToken:
        """What `measure` computes from the logits of the micro-batch's tokens: [N] each.

        Inside the forward because FSDP has gathered the output layer only there.
        """
        part = share(micro, self.context)
        hidden = _hidden(self.causal_lm.base_model, part.micro)
        columns = part.columns(measure.columns)
        found = measure_tokens(self.logits, hidden, part.micro.targets, measure, columns, vocabulary=self.vocabulary)
        return tuple(part.whole(result) for result in found)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] → [N, V]."""
        return self._transform(self.causal_lm.get_output_embeddings()(hidden))  # type: ignore[no-untyped-call]


class ValueModel(nn.Module):
    """A backbone with one value per position, initialised to 0 everywhere."""

    context: ContextGroup | None = None

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """The value before each of the micro-batch's tokens: [N]."""
        part = share(micro, self.context)
        values: Tensor = self.value_head(_hidden(self.backbone, part.micro))
        return _known(part.whole(values.squeeze(-1).float()))


class ScoreModel(nn.Module):
    """A sequence-classification model with one label: its score at the last token of each row."""

    context: ContextGroup | None = None

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, micro: MicroBatch) -> Tensor:
        """[b]; the micro-batch's outputs are the rows' last positions."""
        head = self.classifier.get_submodule("score")
        part = share(micro, self.context)
        scores: Tensor = head(_hidden(self.classifier.base_model, part.micro))
        return _known(part.whole(scores.squeeze(-1).float()))


RoleModel = PolicyModel | ValueModel | ScoreModel


def _known(result: Tensor | None) -> Tensor:
    assert result is not None, "it was computed"
    return result


def _hidden(backbone: nn.Module, micro: MicroBatch) -> Tensor:
    """Hidden states of the micro-batch's outputs: [N, H]."""
    inputs = {} if micro.position_ids is None else {"position_ids": micro.position_ids}
    if micro.response is not None:
        inputs["attention_mask"] = shared_prompts.attention_mask(micro.response)
    hidden: Tensor = backbone(input_ids=micro.input_ids, use_cache=False, **inputs).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, micro.outputs)


def load_policy(spec: ModelSpec, device: torch.device, *, is_frozen: bool = False) -> PolicyModel:
    """With LoRA the model itself is frozen too, and only its adapter learns."""
    causal_lm = open_model(AutoModelForCausalLM, spec, device, is_frozen=is_frozen or bool(spec.lora_rank))
    check_head(causal_lm, spec.path)
    model = PolicyModel(causal_lm)
    return model


def load_value_model(spec: ModelSpec, device: torch.device) -> ValueModel:
    return ValueModel(open_model(AutoModel, spec, device, is_frozen=False))


def load_score_model(spec: ModelSpec, device: torch.device) -> ScoreModel:
    with loading(f"model {spec.path!r}"):
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    if config.num_labels != 1:
        raise PreflightError(f"reward_model.path {spec.path!r} has {config.num_labels} labels; a reward model has 1")
    classifier = open_model(AutoModelForSequenceClassification, spec, device, is_frozen=True)
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        name = type(classifier).__name__
        raise PreflightError(
            f"reward_model.path {spec.path!r} is a {name}; reward models here are causal, with a `score`"
        )
    return ScoreModel(classifier)


@torch.no_grad()
def check_head(causal_lm: PreTrainedModel, path: str) -> None:
    """Refuse a model whose own logits differ from backbone plus head: some architectures do more in between."""
    model = PolicyModel(architecture.clone(causal_lm))
    tokens = torch.arange(3)[None]
    expected = model.causal_lm(input_ids=tokens, use_cache=False).logits[0]
    ours = model.logits(model.causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0])
    if not torch.allclose(expected, ours, rtol=1e-3, atol=1e-3):
        name = type(model.causal_lm).__name__
        raise PreflightError(
            f"model {path!r}: {name} does something after its output layer that tqppo does not support"
        )


def add_lora(model: PolicyModel, spec: ModelSpec, *, seed: int) -> None:
    """Freeze the model and inject adapters in place, initialised from the seed."""
    if importlib.util.find_spec("peft") is None:
        raise PreflightError("model.lora_rank needs peft, which is not installed: pip install 'tqppo[lora]'")
    from peft import LoraConfig, inject_adapter_in_model

    targets = spec.lora_targets[0] if spec.lora_targets == ("all-linear",) else list(spec.lora_targets)
    alpha: Any = spec.lora_alpha  # declared as an integer, used as a factor
    settings = LoraConfig(r=spec.lora_rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    model.requires_grad_(False)
    inject_adapter_in_model(settings, model.causal_lm)
    _init_adapters(model, seed)
    if spec.gradient_checkpointing:
        model.causal_lm.enable_input_require_grads()  # type: ignore[no-untyped-call]


def _init_adapters(model: nn.Module, seed: int) -> None:
    """Start every adapter from the seed, in float32: with the same numbers whether or not the model has memory yet."""
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
            first, second = (cast(nn.Linear, pair["default"]) for pair in (layer.lora_A, layer.lora_B))
            start = nn.init.kaiming_uniform_(torch.empty(first.weight.shape, device="cpu"), a=math.sqrt(5))
            first.weight = nn.Parameter(start)
            second.weight = nn.Parameter(torch.zeros(second.weight.shape, device="cpu"))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the LoRA adapters inside the `with` block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype, *, ranks_per_copy: int = 0) -> nn.Module:
    """FSDP2: parameters stay float32, the computation runs in `dtype`. A single rank in float32 is not sharded.

    Every `ranks_per_copy` neighbours share one copy of the parameters (HSDP), or all ranks (0).
    """
    if not needs_sharding(dtype):
        return model.to(device)
    if not dist.is_initialized():
        raise PreflightError(f"model.dtype {dtype} needs FSDP, which needs a process group")
    size = dist.get_world_size()
    copies = size // (ranks_per_copy or size)
    shape, names = ((size,), ("shards",)) if copies == 1 else ((copies, ranks_per_copy), ("copies", "shards"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The root frees its parameters after each forward too: gathered ones would be stale after `load`.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, found by the class names that the architecture declares."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]
