"""What follows from a config: roles, rows, lengths, and which features decide the data flow. Imports no torch.

Checks, plan and run all ask here, so that they cannot disagree.
"""

from __future__ import annotations

from math import lcm

from tqppo import dataflow
from tqppo.config.plan.shapes import ModelShape, shape_of, tiny_shape
from tqppo.config.sections import Config, OptimizerSection
from tqppo.dataflow import Features, Stage

# -- what the run computes ---------------------------------------------------------------------------------------------


def has_critic(config: Config) -> bool:
    return dataflow.mode_named(config.mode).has_critic


def has_teachers(config: Config) -> bool:
    return dataflow.mode_named(config.mode).has_teachers


def has_policy_loss(config: Config) -> bool:
    """Distillation without the task's reward has no policy term; every other run has one."""
    return not has_teachers(config) or config.distillation.task_reward


def kl_in_reward(config: Config) -> bool:
    algorithm = config.algorithm
    return has_policy_loss(config) and algorithm.kl_reward != "none" and algorithm.kl_reward_coef > 0


def kl_in_loss(config: Config) -> bool:
    algorithm = config.algorithm
    return has_policy_loss(config) and algorithm.kl_loss != "none" and algorithm.kl_loss_coef > 0


def features(config: Config) -> Features:
    """The settings that decide which stages and columns the run has."""
    algorithm, distillation = config.algorithm, config.distillation
    policy, teachers = has_policy_loss(config), has_teachers(config)
    return Features(
        has_policy_loss=policy,
        has_critic=has_critic(config),
        uses_values=policy and algorithm.advantage == "gae",
        has_reward_model=bool(config.reward_model.path),
        recomputes_old_logprobs=algorithm.old_logprobs == "recompute",
        kl_in_reward=kl_in_reward(config),
        kl_in_loss=kl_in_loss(config),
        has_correction_weights=algorithm.correction != "none",
        has_loss_mask=algorithm.reject != "none",
        has_session_weights=algorithm.aggregate == "session-mean",
        has_greedy_baseline=policy and algorithm.advantage == "remax",
        has_token_baseline=policy and algorithm.advantage.endswith("optimal_token_baseline"),
        filters_groups=algorithm.filter_groups,
        has_teachers=teachers and bool(config.teachers),
        teacher_top_k=distillation.top_k if teachers and distillation.loss.endswith("_topk") else 0,
        distills_by_policy_gradient=teachers and distillation.update == "policy_gradient",
    )


def stages(config: Config) -> list[Stage]:
    """The stages of a step, in order."""
    return dataflow.stages_of(dataflow.mode_named(config.mode), features(config))


# -- roles -------------------------------------------------------------------------------------------------------------


def needs_reference(config: Config) -> bool:
    """A reference is needed when, and only when, a KL to it has weight."""
    return features(config).needs_reference


def has_own_reference(config: Config) -> bool:
    """Whether the reference is a model of its own. With LoRA and no path it is the actor without its adapter."""
    return needs_reference(config) and not (config.model.lora_rank and not config.reference.path)


def learning_roles(config: Config) -> tuple[str, ...]:
    return ("actor", "critic") if has_critic(config) else ("actor",)


def optimizer_of(config: Config, role: str) -> OptimizerSection:
    """The settings of a role that learns."""
    return config.critic if role == "critic" else config.actor


def worker_roles(config: Config) -> dict[str, int]:
    """Every role that computes over rows, with its number of ranks."""
    found = {role: optimizer_of(config, role).ranks for role in learning_roles(config)}
    if has_own_reference(config):
        found["reference"] = config.reference.ranks
    if features(config).has_reward_model:
        found["reward_model"] = config.reward_model.ranks
    return found


def roles(config: Config) -> dict[str, int]:
    """Every role that holds a model on the trainer's devices, with its number of processes."""
    return {**worker_roles(config), "rollout": len(config.rollout.endpoints) or config.rollout.replicas}


# -- rows and lengths --------------------------------------------------------------------------------------------------


def is_agent(config: Config) -> bool:
    """Several turns or trajectories: prompts grow beyond the dataset's."""
    return config.rollout.agent != "single_turn"


def rows_per_step(config: Config) -> int:
    """Rows of a step in which every session yields one trajectory."""
    return config.data.batch_size * config.rollout.group_size


def mini_batch_rows(config: Config, role: str) -> int:
    """Rows per optimizer step of a role that learns; 0: the whole batch."""
    return optimizer_of(config, role).mini_batch_size * config.rollout.group_size


def required_multiple(config: Config) -> int:
    """What the number of rows is padded to: every rank count and every mini-batch's rows divide it."""
    learning = learning_roles(config)
    ranks = [optimizer_of(config, role).ranks for role in learning]
    return lcm(*ranks, *(mini_batch_rows(config, role) or 1 for role in learning))


def context_tokens(config: Config) -> int:
    """Tokens of the longest row, which the engine must accept."""
    return config.rollout.max_context_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def horizon(config: Config) -> int:
    """The constant that seq-mean-token-sum-norm divides by."""
    return config.algorithm.horizon or config.rollout.max_new_tokens


def model_shape(config: Config) -> ModelShape | None:
    model = config.model
    if model.path != "tiny":
        return shape_of(model.path)
    return tiny_shape(
        hidden=model.hidden_size, layers=model.num_layers, heads=model.num_heads, tied=model.tie_embeddings
    )


def data_sources(config: Config) -> list[str]:
    return [config.data.train] if isinstance(config.data.train, str) else list(config.data.train)
