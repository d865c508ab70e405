"""Loads the model of the embedded engine and refuses models that it would decode wrongly."""

from __future__ import annotations

import threading

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tqppo.errors import EngineError
from tqppo.protocols import EngineSpec

from . import attention

ENGINE_ARGS = ("device",)  # what `engine_args` may hold
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOADING = threading.Lock()  # `transformers` changes torch for the whole process while it loads a model


def load_model(spec: EngineSpec) -> PreTrainedModel:
    """The model in evaluation mode, on its device. An `EngineError` names the setting to change."""
    device = _device(spec)
    if spec.dtype != "auto" and spec.dtype not in _DTYPES:
        raise EngineError(f"dtype {spec.dtype!r} is unknown; choose auto or one of {', '.join(_DTYPES)}")
    # On a GPU the fused kernels win, and their masks come from `transformers`.
    implementation = attention.register() if device.type == "cpu" else "sdpa"
    # Most CPUs have no bf16 instructions and are several times slower with it, so a CPU decodes in fp32.
    default = torch.float32 if device.type == "cpu" else torch.bfloat16  # as the trainer computes
    try:
        with _LOADING:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                spec.model,
                dtype=_DTYPES.get(spec.dtype, default),
                attn_implementation=implementation if spec.attention == "auto" else spec.attention,
                trust_remote_code=spec.trust_remote_code,
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise EngineError(f"{spec.name} cannot load the model {spec.model!r}: {error}") from error
    _check_supported(model, spec)
    torch.nn.Module.to(model, device)  # `transformers` wraps its own `to` without types
    model.train(False).requires_grad_(False)
    return model


def _device(spec: EngineSpec) -> torch.device:
    unknown = sorted(set(spec.engine_args) - set(ENGINE_ARGS))
    if unknown:
        known = ", ".join(ENGINE_ARGS)
        raise EngineError(f"the embedded engine has no engine_args {', '.join(unknown)}; it knows {known}")
    placed = "cuda" if spec.devices else "cpu"  # Ray lets this process see the GPU of its seat only
    name = str(spec.engine_args.get("device", placed))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(
            f"{spec.name} runs on {name!r}, but torch {torch.__version__} sees no GPU here: it is a CPU build, or the "
            "driver is missing. Install the build of torch for your CUDA version, or set cluster.gpus_per_node = 0"
        )
    return torch.device(name)


def _check_supported(model: PreTrainedModel, spec: EngineSpec) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise EngineError(
            f"the embedded engine decodes attention layers only; {spec.model} also has {', '.join(unknown)}"
        )
    window = getattr(config, "sliding_window", None)
    is_sliding = "sliding_attention" in kinds or (window and not getattr(config, "layer_types", None))
    if is_sliding and window and spec.max_context_tokens > window:
        raise EngineError(
            f"{spec.model} attends to a window of {window} tokens, which the embedded engine does not do: "
            f"max_context_tokens is {spec.max_context_tokens}, it may be at most {window}"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit and spec.max_context_tokens > limit:
        raise EngineError(
            f"max_context_tokens is {spec.max_context_tokens}, but {spec.model} has only {limit} positions"
        )
