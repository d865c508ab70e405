"""Post-train language models with reinforcement learning. The names below are the public ones; each loads on first use.

import tqppo
run = tqppo.train("quickstart", overrides={"run.max_steps": 50})
run.metrics()["critic/score/mean"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqppo.api.runs import Run, evaluate, load_model, resume, train
    from tqppo.columns import Column, Kind, declare
    from tqppo.config.compilation import Compilation
    from tqppo.config.compile import compile_config
    from tqppo.data.prompts import Prompt
    from tqppo.dataflow import Features, Mode, Stage
    from tqppo.errors import TqppoError
    from tqppo.protocols import Completion, EngineSpec, Request, RolloutEngine, Sampling
    from tqppo.queue.client import Queue
    from tqppo.queue.meta import BatchMeta, Jagged
    from tqppo.queue.storage import Storage, StorageSpec
    from tqppo.rollout.chat import Conversation
    from tqppo.rollout.environments import Environment, Step
    from tqppo.rollout.loops.base import AgentLoop
    from tqppo.rollout.session import Session
    from tqppo.rollout.trajectory import Trajectory
    from tqppo.trainers.stages import Stages, Trainer

_HOMES = {
    "api.runs": ("Run", "evaluate", "load_model", "resume", "train"),
    "columns": ("Column", "Kind", "declare"),
    "config.compilation": ("Compilation",),
    "config.compile": ("compile_config",),
    "data.prompts": ("Prompt",),
    "dataflow": ("Features", "Mode", "Stage"),
    "errors": ("TqppoError",),
    "protocols": ("Completion", "EngineSpec", "Request", "RolloutEngine", "Sampling"),
    "queue.client": ("Queue",),
    "queue.meta": ("BatchMeta", "Jagged"),
    "queue.storage": ("Storage", "StorageSpec"),
    "rollout.chat": ("Conversation",),
    "rollout.environments": ("Environment", "Step"),
    "rollout.loops.base": ("AgentLoop",),
    "rollout.session": ("Session",),
    "rollout.trajectory": ("Trajectory",),
    "trainers.stages": ("Stages", "Trainer"),
}
_MODULE_OF = {name: f"tqppo.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "AgentLoop",
    "BatchMeta",
    "Column",
    "Compilation",
    "Completion",
    "Conversation",
    "EngineSpec",
    "Environment",
    "Features",
    "Jagged",
    "Kind",
    "Mode",
    "Prompt",
    "Queue",
    "Request",
    "RolloutEngine",
    "Run",
    "Sampling",
    "Session",
    "Stage",
    "Stages",
    "Step",
    "Storage",
    "StorageSpec",
    "TqppoError",
    "Trainer",
    "Trajectory",
    "compile_config",
    "declare",
    "evaluate",
    "load_model",
    "resume",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tqppo' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
