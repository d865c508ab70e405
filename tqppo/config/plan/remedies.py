"""Settings that would make a plan fit: each is tried on the plan before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tqppo.config import facts
from tqppo.config.plan.budget import MemoryBudget, StageMemory
from tqppo.config.sections import Config, Section

Change = dict[str, object]  # dotted key → value
LORA_RANK = 32


def remedies(config: Config, fits: Callable[[Config], bool], candidates: Iterator[Change], most: int = 3) -> str:
    """The first few changes with which the plan fits, as `set a = 1, or b = 2 and c = 3`; empty if none does.

    Of changes of the same settings only the first is named, and none that has another change inside it.
    """
    found: list[Change] = []
    for change in candidates:
        is_new = not any(each.keys() <= change.keys() for each in found)
        if is_new and len(found) < most and fits(changed(config, change)):
            found.append(change)
    words = [" and ".join(f"{key} = {_toml(value)}" for key, value in change.items()) for change in found]
    return f"set {', or '.join(words)}" if words else ""


def changed(config: Config, change: Change) -> Config:
    """A copy of a config with other values."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    copies: dict[str, Section] = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=copies)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def fits_gpu(plan: Callable[[Config], MemoryBudget], stage: StageMemory) -> Callable[[Config], bool]:
    """Whether a changed config no longer overfills the GPU at this stage."""
    return lambda config: all(each.stage != stage.stage for each in plan(config).overfull)


def for_worker(config: Config, role: str) -> Iterator[Change]:
    """Changes that make a worker smaller, the cheapest first."""
    learns = role in facts.learning_roles(config)
    section = facts.section_of(config, role)
    smaller: Change = {}
    if learns and not facts.optimizer_of(config, role).gradient_checkpointing:
        smaller = {f"{role}.gradient_checkpointing": True}
        yield smaller
    tokens, longest = section.micro_batch_tokens, -(-facts.context_tokens(config) // section.context_parallel)
    while tokens // 2 >= longest:
        tokens //= 2
        yield smaller | {f"{role}.micro_batch_tokens": tokens}
    devices = config.cluster.nodes * config.cluster.gpus_per_node
    ranks = section.ranks * 2
    while ranks <= devices:
        yield {f"{role}.ranks": ranks}
        ranks *= 2
    if role == "actor" and not config.model.lora_rank:
        yield smaller | {"model.lora_rank": LORA_RANK}
    ranks = max(2 * devices, 2 * section.ranks)
    for factor in (1, 2, 4, 8):
        nodes = max(1, ranks * factor // max(1, config.cluster.gpus_per_node))
        yield smaller | {f"{role}.ranks": ranks * factor, "cluster.nodes": nodes}


def for_host(config: Config) -> Iterator[Change]:
    """Changes that make the processes of a node smaller together."""
    for role in facts.learning_roles(config):
        yield from for_worker(config, role)
    rows = config.rollout.max_running
    while rows > 8:
        rows //= 2
        yield {"rollout.max_running": rows}


def for_engine(config: Config, key: str) -> Iterator[Change]:
    """Changes that give an engine more of each GPU, or spread it over more."""
    section = key.rpartition(".")[0]
    if section != "rollout":
        return
    for tenths in range(1, 10):
        if tenths / 10 > config.rollout.memory_fraction:
            yield {key: tenths / 10}
    size = config.rollout.tensor_parallel * 2
    while size <= config.cluster.gpus_per_node:
        replicas = max(1, config.rollout.replicas * config.rollout.tensor_parallel // size)
        yield {"rollout.tensor_parallel": size, "rollout.replicas": replicas}
        size *= 2
