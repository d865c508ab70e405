"""What each engine can do, told without importing it. Back ends take their own from here.

A third party's engine declares its own under the entry-point group `tqppo.capabilities`, with the engine's
name, pointing at an `EngineCapabilities` in a module that imports nothing heavy.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from tqppo.protocols import EngineCapabilities

BUILT_IN: dict[str, EngineCapabilities] = {
    "embedded": EngineCapabilities(score_top_k=2**31 - 1, deterministic=True),
    "vllm": EngineCapabilities(
        score_top_k=1024, needs_environment=True, attach=True, tensor_parallel=True, broadcast=True
    ),
    "sglang": EngineCapabilities(
        score_top_k=1024,
        needs_environment=True,
        attach=True,
        tensor_parallel=True,
        broadcast=True,
        joint_filters=True,
    ),
}


def capabilities_of(name: str) -> EngineCapabilities | None:
    """None for an engine that declares nothing: then nothing is assumed about it."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group="tqppo.capabilities"):
        if point.name == name:
            declared = point.load()
            return declared if isinstance(declared, EngineCapabilities) else None
    return None
