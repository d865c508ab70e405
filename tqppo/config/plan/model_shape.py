"""The shape of a decoder: what parameter counts, memory, FLOPs and context lengths need of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLP of a mixture: each token is computed by a few of many experts, and by the shared ones."""

    count: int
    per_token: int
    intermediate: int  # of one expert
    shared: int = 0  # intermediate size of the experts that compute every token, all together
    dense_layers: int = 0  # layers with an ordinary MLP


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's attention: queries, and keys with values, pass a narrow layer, whose output is what is cached."""

    query_rank: int  # 0: queries are computed directly
    kv_rank: int
    rope_size: int  # of a head's part with positions, which all heads of the keys share
    plain_size: int  # of its part without
    value_size: int

    def parameters(self, hidden: int, heads: int) -> int:
        query = heads * (self.plain_size + self.rope_size)
        into = self.query_rank * (hidden + query) if self.query_rank else hidden * query
        keys = hidden * (self.kv_rank + self.rope_size) + self.kv_rank * heads * (self.plain_size + self.value_size)
        return into + keys + heads * self.value_size * hidden


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: attention with grouped key-value heads, a gated MLP or experts, two norms a layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False
    head_dim: int = 0  # 0: hidden / heads
    source: str = "known name"
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        if self.latent:
            return self.latent.parameters(self.hidden, self.heads)
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of the largest layer. Biases are left out (under 0.02 % of a 7B model)."""
        widths = self.intermediate
        router = 0
        if self.experts:
            widths = self.experts.count * self.experts.intermediate + self.experts.shared
            router = self.experts.count * self.hidden
        return self.attention_parameters + 3 * self.hidden * widths + router + 2 * self.hidden

    @property
    def dense_layer_parameters(self) -> int:
        """Weights of a layer without experts."""
        return self.attention_parameters + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Weights outside of the layers: embedding, output layer, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        dense = self.experts.dense_layers if self.experts else 0
        sparse = self.layers - dense
        return self.outer_parameters + sparse * self.layer_parameters + dense * self.dense_layer_parameters

    @property
    def active_intermediate(self) -> int:
        """Width of the MLP that computes one token, over all its experts."""
        if self.experts is None:
            return self.intermediate
        return self.experts.per_token * self.experts.intermediate + self.experts.shared

    @property
    def cached_numbers(self) -> int:
        """Numbers that the KV cache holds of one token, over all layers."""
        if self.latent:
            return self.layers * (self.latent.kv_rank + self.latent.rope_size)
        return self.layers * 2 * self.kv_heads * self.head_size
