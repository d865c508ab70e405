"""A run in one process has one rank per role, the embedded engine, the simple storage and no GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import has_teachers, worker_roles
from tqppo.config.sections import Config

KEY = "cluster.in_process"


@check("mode", "cluster.*", "rollout.*", "storage.backend", "actor.*", "critic.*", "reference.*", "reward_model.*",
       "teachers.*", "distillation.*")  # fmt: skip
def one_process_has_room(context: Context) -> Iterator[Diagnostic]:
    if not context.config.cluster.in_process:
        return
    for key, (allowed, why) in wanted(context.config).items():
        if context.value(key) != allowed:
            shown = f'"{allowed}"' if isinstance(allowed, str) else str(allowed)
            yield context.report(
                "E423",
                f"cluster.in_process: {why}",
                (key, KEY),
                allowed=shown,
                fix=f"set {key} = {shown}, or {KEY} = false",
            )


def wanted(config: Config) -> dict[str, tuple[str | int, str]]:
    """The only value of each setting that one process can have, and why."""
    engine, one = "the engine of one process is the embedded one", "one process has one replica of an engine"
    found: dict[str, tuple[str | int, str]] = {
        "cluster.address": ("", "one process joins no cluster"),
        "cluster.nodes": (1, "one process is on one node"),
        "cluster.gpus_per_node": (0, "one process computes on CPUs"),
        "rollout.backend": ("embedded", engine),
        "rollout.replicas": (1, one),
        "storage.backend": ("simple", "the rows of one process are in its own files"),
    }
    found |= {f"{role}.ranks": (1, "one process has one rank of each role") for role in worker_roles(config)}
    if has_teachers(config):
        found["distillation.gpus_per_node"] = (0, "one process computes on CPUs")
        for name in config.teachers:
            found |= {f"teachers.{name}.backend": ("embedded", engine), f"teachers.{name}.replicas": (1, one)}
    return found
