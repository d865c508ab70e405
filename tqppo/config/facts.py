"""What a config implies: which roles there are, how rows are counted, how long they get. Shared by checks and plan."""

from __future__ import annotations

from math import lcm

from tqppo.config.plan.shapes import Shape, shape_of, tiny_shape
from tqppo.config.sections import Config


def learning_roles(config: Config) -> tuple[str, ...]:
    return ("actor", "critic") if config.mode == "ppo" else ("actor",)


def uses_reference(config: Config) -> bool:
    """A reference is needed when, and only when, KL to it is used; distillation alone measures KL to its teachers."""
    if config.mode == "distill" and not config.distillation.task_reward:
        return False
    return config.algorithm.kl_loss != "none" or config.algorithm.kl_reward != "none"


def has_own_reference(config: Config) -> bool:
    """With LoRA and no reference.path the actor is its own reference, adapter off."""
    return uses_reference(config) and not (config.model.lora_rank and not config.reference.path)


def is_agent(config: Config) -> bool:
    """Several turns or trajectories: prompts grow beyond the dataset's."""
    return config.rollout.agent != "single_turn"


def rows_per_step(config: Config) -> int:
    """Rows of a step in which every session yields one trajectory."""
    return config.data.batch_size * config.rollout.group_size


def required_multiple(config: Config) -> int:
    """What the number of rows is padded to: every rank count and every mini-batch's rows divide it."""
    multiple = config.actor.ranks
    for role in learning_roles(config):
        section = getattr(config, role)
        multiple = lcm(multiple, section.ranks, section.mini_batch_size * config.rollout.group_size or 1)
    return multiple


def context_tokens(config: Config) -> int:
    """The longest row: what the engine is told to accept."""
    return config.rollout.max_context_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def model_shape(config: Config) -> Shape | None:
    model = config.model
    if model.path != "tiny":
        return shape_of(model.path)
    return tiny_shape(
        hidden=model.hidden_size, layers=model.num_layers, heads=model.num_heads, tied=model.tie_embeddings
    )


def data_sources(config: Config) -> list[str]:
    return [config.data.train] if isinstance(config.data.train, str) else list(config.data.train)
