"""Before a run on several nodes starts: each of them has the same software and files, and sees the run's folder.

A difference would show as a failure of one rank, or as a model that learns something else on one node.
"""

from __future__ import annotations

import logging
import platform
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqppo.config.plan.budget import make_budget
from tqppo.config.plan.memory import total
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.processes.hosting import described, settle
from tqppo.processes.nodes import own_address
from tqppo.space import SHARED_MEMORY, Digest
from tqppo.units import size

log = logging.getLogger(__name__)

PACKAGES = ("tqppo", "torch", "transformers", "safetensors", "numpy")
TIMEOUT_S = 120.0
WHOLE_BYTES = 1 << 24  # files up to this size are compared by their bytes, larger ones by their size
MISSING, UNREADABLE = "missing", "cannot be read"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node has: versions by package, and what stands for the contents of each file."""

    node: str
    versions: Mapping[str, str]
    files: Mapping[str, str]
    shared_bytes: int  # free in /dev/shm


def look(files: Sequence[str]) -> NodeReport:
    """The report of this process's node."""
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return NodeReport(
        f"node {own_address()} ({socket.gethostname()})",
        {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        {name: _contents(Path(name)) for name in files},
        shared,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _contents(path: Path) -> str:
    """What stands for a file or for everything in a folder: equal on two nodes if these have the same."""
    try:
        if path.is_dir():
            return " ".join(f"{each.name}:{_contents(each)}" for each in sorted(path.iterdir()) if each.is_file())
        if not path.is_file():
            return MISSING
        num_bytes = path.stat().st_size
        return Digest.of(path).sha256 if num_bytes <= WHOLE_BYTES else f"{num_bytes} bytes"
    except OSError as error:
        return f"{UNREADABLE}: {error.strerror}"


def differences(mine: NodeReport, others: Sequence[NodeReport]) -> list[str]:
    """What nodes have otherwise than the driver's node, one line for each."""
    found = []
    for other in others:
        for name, expected in mine.versions.items():
            has = other.versions.get(name, MISSING)
            if has != expected:
                found.append(f"{other.node}: {name} is {has}, and {expected} on the driver's {mine.node}")
        for file, expected in mine.files.items():
            has = other.files.get(file, MISSING)
            if has == MISSING or has.startswith(UNREADABLE):
                found.append(f"{other.node}: {file} {'is missing' if has == MISSING else has}")
            elif has != expected:
                found.append(f"{other.node}: {file} is not what it is on the driver's {mine.node}")
    return found


def shortages(reports: Sequence[NodeReport], needed: float) -> list[str]:
    """Nodes whose /dev/shm is too small for rows and weights, which then take the slower way through files."""
    return [
        f"{each.node}: /dev/shm has {size(each.shared_bytes)} free, and rows and new weights take {size(needed)}"
        for each in reports
        if each.shared_bytes < needed
    ]


def files_of_all_nodes(config: Config, folder: Path, model: str) -> list[str]:
    """What every node reads: the run's config, the model where it is a folder, the user's code."""
    functions = config.reward.function
    code = [*([functions] if isinstance(functions, str) else functions), config.rollout.agent]
    modules = [Path(each.rpartition(":")[0]).expanduser().resolve() for each in code if ".py:" in each]
    models = [Path(model).resolve()] if Path(model).is_dir() else []
    return [str(each) for each in (folder.resolve(), *models, *modules)]


def check_nodes(config: Config, run_config: Path, model: str) -> None:
    """Compare every node of the cluster with the driver's. `PreflightError` names nodes and differences."""
    files = files_of_all_nodes(config, run_config, model)
    others, problems = _reports(config, files)
    if problems := [*problems, *differences(look(files), others)]:
        listed = "\n  ".join(problems)
        raise PreflightError(
            f"the nodes of the cluster are not alike:\n  {listed}\n"
            "Install the same packages on all of them, and put run.dir, the model and your code where all see them"
        )
    for each in shortages(others, total(make_budget(config).shared)):
        log.warning(each)


def _reports(config: Config, files: Sequence[str]) -> tuple[list[NodeReport], list[str]]:
    """The reports of all nodes that the run may use, and why others gave none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tqppo.processes.ray_launcher import RayCall

    listed: Callable[[], list[dict[str, Any]]] = ray.nodes
    kind = "GPU" if config.cluster.gpus_per_node else "CPU"
    nodes = [node for node in listed() if node["Alive"] and node["Resources"].get(kind)]
    task = ray.remote(num_cpus=0)(look)
    asked = []
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(RayCall(task.options(scheduling_strategy=where).remote(list(files))))
    found, problems = [], []
    for node, call in zip(nodes, asked, strict=True):
        name, settled = f"node {node['NodeManagerAddress']}", settle([call], TIMEOUT_S)
        if settled.failures:
            problems.append(f"{name} cannot report: {described(settled.failures[0])}")
        elif settled.pending:
            problems.append(f"{name} did not report within {TIMEOUT_S:g} s")
        else:
            found.append(call.result())
    return found, problems
