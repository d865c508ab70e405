"""The size of a CPU engine's KV cache: every sequence that may run at once, at its longest.

On a GPU engines take what `memory_fraction` leaves. On a CPU they would take a share of the machine's memory, or a size
that does not follow the model.
"""

from __future__ import annotations

from transformers import AutoConfig

from tqppo.protocols import EngineSpec

BLOCK_TOKENS = 128  # most tokens by which an engine rounds a sequence up
LEAST_SEQUENCES = 2


def cache_tokens(spec: EngineSpec, longest: int) -> int:
    """Tokens of all sequences, each of at most `longest` tokens."""
    rounded = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
    return max(LEAST_SEQUENCES, spec.max_running) * rounded


def token_bytes(spec: EngineSpec) -> int:
    """Bytes of one token's keys and values over all layers."""
    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = 2 if spec.dtype in ("bfloat16", "float16") else 4
    return int(2 * config.num_hidden_layers * heads * width * item)
