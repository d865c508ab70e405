"""The same forward as the model's own class, as plain tensor operations, for the families whose layers are Llama's.

On a CPU a small model's decoding step is mostly the Python of modules, decorators, masks and rotary tables; this one
has none of it. The weights are the model's own parameters, not copies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from . import attention
from .forward import ModuleForward
from .kv import DecodeCache, PrefillCache

log = logging.getLogger(__name__)

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone, not on the length
AGREES = 1e-4  # largest difference of logits from the model's own; rounding alone is about 1e-6

Affine = tuple[Tensor, Tensor | None]  # weight and bias
Rotation = tuple[Tensor, Tensor]  # cosines and sines, to be broadcast over heads


@dataclass(frozen=True, slots=True)
class Norm:
    """x / √(mean(x²) + ε) × weight over the last dimension of size n; √(Σx² + nε) is a hypotenuse."""

    weight: Tensor
    floor: Tensor  # √(nε)

    def __call__(self, x: Tensor) -> Tensor:
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        return (x / root.mul_(x.shape[-1] ** -0.5)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one layer."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    gate: Affine
    up: Affine
    down: Affine
    before_attention: Norm
    before_mlp: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    head_size: int
    scale: float

    @classmethod
    def of(cls, module: Any) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        return cls(
            query=_affine(attention.q_proj),
            key=_affine(attention.k_proj),
            value=_affine(attention.v_proj),
            output=_affine(attention.o_proj),
            gate=_affine(mlp.gate_proj),
            up=_affine(mlp.up_proj),
            down=_affine(mlp.down_proj),
            before_attention=_norm(module.input_layernorm),
            before_mlp=_norm(module.post_attention_layernorm),
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            head_size=attention.head_dim,
            scale=attention.scaling,
        )

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, D], keys and values [..., K, D] of hidden states [..., hidden]."""
        x = self.before_attention(hidden)
        shape = (*x.shape[:-1], -1, self.head_size)
        query, key = linear(x, *self.query).view(shape), linear(x, *self.key).view(shape)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotated(query, *rotation), rotated(key, *rotation), linear(x, *self.value).view(shape)

    def finish(self, hidden: Tensor, attended: Tensor) -> None:
        """Add the attention's result [..., H, D] and the MLP to the hidden states, in place."""
        hidden += linear(attended.flatten(-2), *self.output)
        x = self.before_mlp(hidden)
        hidden += linear(silu(linear(x, *self.gate), inplace=True).mul_(linear(x, *self.up)), *self.down)


class PlainForward(ModuleForward):
    """Decodes and prefills by itself; scores through the model."""

    def __init__(self, model: Any, max_positions: int) -> None:
        super().__init__(model)
        base = model.model
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [Layer.of(layer) for layer in base.layers]
        self._norm = _norm(base.norm)
        self._output = _affine(model.lm_head)
        with torch.no_grad():
            positions = torch.arange(max_positions, device=self.device)[None]
            cosines, sines = (table[0, :, None] for table in base.rotary_emb(self._embedding, positions))  # [P, 1, D]
        self._cosines = cosines
        self._sines = torch.cat((-sines[..., : sines.shape[-1] // 2], sines[..., sines.shape[-1] // 2 :]), -1)

    def prefill(self, tokens: Tensor, last: Tensor) -> tuple[PrefillCache, Tensor]:
        num_prompts, longest = tokens.shape
        cache = PrefillCache()
        rotation = self._cosines[:longest], self._sines[:longest]
        hidden = embedding(tokens, self._embedding)  # [U, T, hidden]
        for number, layer in enumerate(self._layers):
            query, key, value = (x.transpose(1, 2) for x in layer.project(hidden, rotation))  # [U, H or K, T, D]
            cache.update(key, value, number)
            is_grouped = query.shape[1] != key.shape[1]
            attended = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=layer.scale, enable_gqa=is_grouped
            )
            layer.finish(hidden, attended.transpose(1, 2))
        return cache, self._head_of(hidden[torch.arange(num_prompts, device=self.device), last])

    def decode(self, tokens: Tensor, cache: DecodeCache, starts: Tensor | None) -> Tensor:
        if starts is None:
            mask, place = None, cache.cursor - cache.first
            rotation = self._cosines[place], self._sines[place]
        else:
            mask, places = cache.window_mask(), cache.cursor - starts
            rotation = self._cosines.index_select(0, places), self._sines.index_select(0, places)
        hidden = embedding(tokens, self._embedding)  # [B, hidden]
        for layer, (new_key, new_value, keys, values) in zip(self._layers, cache.steps(), strict=True):
            query, key, value = layer.project(hidden, rotation)
            new_key.copy_(key)
            new_value.copy_(value)
            layer.finish(hidden, attention.attend(query, keys, values, mask, layer.scale))
        return self._head_of(hidden)

    def _head_of(self, hidden: Tensor) -> Tensor:
        return linear(self._norm(hidden), *self._output)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of [..., H, D]; the first half of the sines carries the minus sign."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)


def fastest_forward(model: Any, max_positions: int) -> ModuleForward:
    """The plain forward when the model is of a family it knows and both agree, else the model's own."""
    own = ModuleForward(model)
    if not _is_plain(model):
        return own
    plain = PlainForward(model, max_positions)
    if _agree(own, plain, min(max_positions, 5)):
        return plain
    log.warning("%s differs from the forward that tqppo has for it; decoding with its own", type(model).__name__)
    return own


def _is_plain(model: Any) -> bool:
    config = model.config
    return (
        type(model) in FAMILIES
        and model.dtype == torch.float32
        and config._attn_implementation == attention.NAME
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in FIXED_ROTARY
        and all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    )


@torch.inference_mode()
def _agree(own: ModuleForward, plain: ModuleForward, length: int) -> bool:
    """The logits after two prompts, one of them with padding."""
    tokens = torch.arange(2 * length, device=own.device).view(2, length) % own.vocabulary
    last = torch.tensor([length - 1, 0], device=own.device)
    expected = own.logits(tokens)[[0, 1], last]
    _, found = plain.prefill(tokens, last)
    return bool((found - expected).abs().max() <= AGREES * expected.abs().max().clamp(min=1))


def _affine(module: nn.Linear) -> Affine:
    return module.weight, module.bias


def _norm(module: Any) -> Norm:
    floor = (module.weight.shape[0] * module.variance_epsilon) ** 0.5
    return Norm(module.weight, module.weight.new_tensor(floor))
