"""What each engine can do, known without importing it. The built-in engines read their own entries here.

An engine from another package declares an `EngineCapabilities` under the entry-point group `tqppo.capabilities`, with
the engine's name, in a module that imports nothing heavy.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from tqppo.protocols import EngineCapabilities

# SGLang sends hidden states as JSON numbers that its scheduler makes: some 20 bytes a number, so that the top 64 tokens
# are the better choice for wide models. vLLM has hidden states only in servers that do nothing but pooling.
BUILT_IN: dict[str, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        score_top_k=2**31 - 1,
        score_hidden=True,
        deterministic=True,
        reserves_memory=False,
        keeps_prefixes=True,
        maps_weights=True,
    ),
    "vllm": EngineCapabilities(
        score_top_k=1024, needs_environment=True, attach=True, tensor_parallel=True, broadcast=True
    ),
    "sglang": EngineCapabilities(
        score_top_k=1024,
        score_hidden=True,
        needs_environment=True,
        attach=True,
        tensor_parallel=True,
        broadcast=True,
        joint_filters=True,
    ),
}

OURS = "delete it: tqppo depends on the value that it sets"
OWNED: dict[str, dict[str, str]] = {
    "vllm": {
        "model": "model.path",
        "served-model-name": OURS,
        "host": "rollout.host",
        "port": OURS,
        "dtype": "model.dtype",
        "api-key": OURS,
        "middleware": OURS,
        "logprobs-mode": OURS,
        "max-logprobs": OURS,
        "max-model-len": "rollout.max_context_tokens",
        "max-num-seqs": "rollout.max_running",
        "tokens-only": OURS,
        "skip-tokenizer-init": OURS,
        "generation-config": OURS,
        "enable-sleep-mode": OURS,
        "tensor-parallel-size": "rollout.tensor_parallel",
        "gpu-memory-utilization": "rollout.memory_fraction",
        "trust-remote-code": "model.trust_remote_code",
        "seed": "run.seed",
        "worker-extension-cls": OURS,
    },
    "sglang": {
        "model-path": "model.path",
        "model": "model.path",
        "served-model-name": OURS,
        "host": "rollout.host",
        "port": OURS,
        "dtype": "model.dtype",
        "device": OURS,
        "api-key": OURS,
        "admin-api-key": OURS,
        "skip-tokenizer-init": OURS,
        "context-length": "rollout.max_context_tokens",
        "max-running-requests": "rollout.max_running",
        "tensor-parallel-size": "rollout.tensor_parallel",
        "tp-size": "rollout.tensor_parallel",
        "mem-fraction-static": "rollout.memory_fraction",
        "trust-remote-code": "model.trust_remote_code",
        "random-seed": "run.seed",
        "enable-deterministic-inference": "run.deterministic",
        "enable-memory-saver": OURS,
        "sampling-mask-max-tokens": OURS,
        "custom-weight-loader": OURS,
    },
}
"""Arguments of the servers that tqppo sets itself, with the setting to use instead."""


def argument_name(written: str) -> str:
    """The canonical name: `--max_num_seqs` is `max-num-seqs`."""
    return written.lstrip("-").replace("_", "-")


def instead_of(backend: str, written: str) -> str:
    """Advice for an entry of engine_args that tqppo sets itself; empty if the user may set it."""
    setting = OWNED.get(backend, {}).get(argument_name(written), "")
    return setting if setting in ("", OURS) else f"use {setting}"


def capabilities_of(name: str) -> EngineCapabilities | None:
    """The capabilities of an engine; None if it declares none, and then `validate-config` assumes nothing."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group="tqppo.capabilities"):
        if point.name == name:
            declared = point.load()
            return declared if isinstance(declared, EngineCapabilities) else None
    return None
