"""What follows from a config: roles, rows, lengths, and which features decide the data flow. Imports no torch.

Checks, plan and run all ask here, so that they cannot disagree.
"""

from __future__ import annotations

import re
from math import lcm

from tqppo import dataflow
from tqppo.builtin import TASK
from tqppo.config.plan.model_shape import ModelShape
from tqppo.config.plan.shapes import shape_of, tiny_shape
from tqppo.config.sections import Config, OptimizerSection, ReferenceSection, RewardModelSection
from tqppo.dataflow import Features, Stage
from tqppo.engines.capabilities import capabilities_of
from tqppo.protocols import EngineCapabilities
from tqppo.units import GIB

WHOLE_VOCABULARY = ("forward_kl", "reverse_kl")  # losses that compare all tokens of the vocabulary

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
    by_policy_gradient = teachers and distillation.update == "policy_gradient"
    compares_policies = policy or by_policy_gradient
    return Features(
        has_policy_loss=policy,
        has_critic=has_critic(config),
        uses_values=policy and algorithm.advantage == "gae",
        has_reward_model=bool(config.reward_model.path),
        recomputes_old_logprobs=algorithm.old_logprobs == "recompute",
        takes_one_step=takes_one_step(config),
        kl_in_reward=kl_in_reward(config),
        kl_in_loss=kl_in_loss(config),
        has_correction_weights=compares_policies and algorithm.correction != "none",
        has_loss_mask=compares_policies and algorithm.reject != "none",
        has_session_weights=algorithm.aggregate == "session-mean",
        has_greedy_baseline=policy and algorithm.advantage == "remax",
        has_token_baseline=policy and algorithm.advantage.endswith("optimal_token_baseline"),
        credits_turns=policy and (algorithm.advantage == "gigpo" or algorithm.credit == "turn"),
        filters_groups=algorithm.filter_groups,
        has_teachers=teachers and bool(config.teachers),
        teacher_top_k=distillation.top_k if uses_top_k(config) else 0,
        teacher_hidden=teachers and distillation.loss in WHOLE_VOCABULARY,
        distills_by_policy_gradient=by_policy_gradient,
    )


def uses_top_k(config: Config) -> bool:
    """Whether teachers send their likeliest tokens."""
    return has_teachers(config) and config.distillation.loss.endswith("_topk")


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


RoleSection = OptimizerSection | ReferenceSection | RewardModelSection


def section_of(config: Config, role: str) -> RoleSection:
    """The settings of a role that computes over rows."""
    if role in learning_roles(config):
        return optimizer_of(config, role)
    return config.reward_model if role == "reward_model" else config.reference


def row_shares(config: Config, role: str) -> int:
    """Number of shares that a role's rows are cut into: one for each group of ranks that compute a row together."""
    section = section_of(config, role)
    return max(1, section.ranks // section.context_parallel)


def tokens_of_forward(config: Config, role: str) -> int:
    """Most tokens in one forward of a role, over the ranks that share its rows."""
    section = section_of(config, role)
    return section.micro_batch_tokens * section.context_parallel


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


# -- engines -----------------------------------------------------------------------------------------------------------


def engine(backend: str) -> EngineCapabilities:
    """What an engine can do; the defaults for one that declares nothing."""
    return capabilities_of(backend) or EngineCapabilities()


def verifies_weights(config: Config) -> bool:
    """Whether engines are compared with the trainer after each weight sync. One that maps the trainer's file has no
    copy to compare; on a GPU or another node it has one."""
    has_copy = bool(config.cluster.gpus_per_node) or config.cluster.nodes > 1
    return config.rollout.verify_weights and (has_copy or not engine(config.rollout.backend).maps_weights)


def published_versions(config: Config) -> int:
    """Versions of the weights that are kept: of the engines' next steps, and of the one that they use."""
    return max(2, config.rollout.ahead + 1)


# -- cores -------------------------------------------------------------------------------------------------------------

SMALL_MODEL = 500_000  # parameters up to which a second thread takes as much from a decoder as it gives


def worker_threads(config: Config) -> int:
    """Torch threads of each process of a role that computes over rows; 0, with GPUs: torch's own choice.

    Roles that learn compute at the same time, and share the cores, also with engines that sample ahead. In one process
    they would not need to, but they give the same bytes everywhere.
    """
    if config.run.threads or config.cluster.gpus_per_node:
        return config.run.threads
    engines = roles(config)["rollout"] if config.rollout.ahead else 0
    return max(1, config.run.cores // (_learning_ranks(config) + engines))


def _learning_ranks(config: Config) -> int:
    return sum(optimizer_of(config, role).ranks for role in learning_roles(config))


def engine_threads(config: Config) -> int:
    """Torch threads of each replica of the rollout engine."""
    if config.run.threads:
        return config.run.threads
    shape, replicas = model_shape(config), roles(config)["rollout"]
    is_small = shape is not None and shape.parameters <= SMALL_MODEL
    is_alone = not config.cluster.gpus_per_node and not has_teachers(config)  # teachers score while it decodes
    shares_cores = engine(config.rollout.backend).maps_weights and is_alone and not is_small
    others = _learning_ranks(config) if config.rollout.ahead else 0
    return max(1, config.run.cores // (replicas + others)) if shares_cores else 1


def threads(config: Config) -> dict[str, int]:
    """Torch threads of each process, by role."""
    return {"rollout": engine_threads(config), **dict.fromkeys(worker_roles(config), worker_threads(config))}


# -- rows and lengths --------------------------------------------------------------------------------------------------


def is_agent(config: Config) -> bool:
    """Several turns or trajectories: prompts grow beyond the dataset's."""
    return config.rollout.agent != "single_turn"


def prefix_cache_bytes(config: Config) -> int:
    """Largest size of the caches that one replica keeps between turns; 0 where no session has a second one."""
    return int(config.rollout.prefix_cache_gb * GIB) if keeps_prefixes(config) else 0


def keeps_prefixes(config: Config) -> bool:
    """Whether the engine keeps caches of sessions between their turns, within a budget of ours."""
    return is_agent(config) and engine(config.rollout.backend).keeps_prefixes


def storage_budget_bytes(config: Config) -> int:
    """Tensors that the storage holds on one node, at most."""
    return int(config.storage.budget_gb * GIB)


def rows_per_step(config: Config) -> int:
    """Rows of a step in which every session yields one trajectory."""
    return config.data.batch_size * config.rollout.group_size


def sessions_at_once(config: Config) -> int:
    """Sessions of a step that one replica has under way at most."""
    share = -(-rows_per_step(config) // config.rollout.replicas)
    return min(share, config.rollout.max_sessions or share)


def running_rows(config: Config) -> int:
    """Sequences that one replica decodes at once: never more than a step or a validation has for it."""
    answers = config.validation.num_prompts * (config.validation.samples + 1)
    rows = max(rows_per_step(config), answers)
    return min(config.rollout.max_running, -(-rows // config.rollout.replicas))


def mini_batch_rows(config: Config, role: str) -> int:
    """Rows per optimizer step of a role that learns; 0: the whole batch."""
    return optimizer_of(config, role).mini_batch_size * config.rollout.group_size


def takes_one_step(config: Config) -> bool:
    """Whether the actor takes one optimizer step per batch, however many rows it has."""
    actor, most = config.actor, config.data.batch_size
    is_whole = actor.mini_batch_size == 0 or (actor.mini_batch_size == most and config.rollout.max_trajectories == 1)
    return is_whole and actor.epochs == 1


def required_multiple(config: Config) -> int:
    """What the number of rows is padded to: every role's number of shares and every mini-batch's rows divide it."""
    learning = learning_roles(config)
    shares = [row_shares(config, role) for role in learning]
    return lcm(*shares, *(mini_batch_rows(config, role) or 1 for role in learning))


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


def is_warmed(config: Config) -> bool:
    """Whether a model that was found, not made, gets supervised steps first. They need demonstrations of their own."""
    return config.model.path != "tiny" and config.warm_start.steps > 0 and bool(config.warm_start.data)


def makes_model(config: Config) -> bool:
    """Whether the run starts from a model in its own folder, and not from the one that model.path names."""
    return config.model.path == "tiny" or is_warmed(config)


def warm_start_lr(config: Config) -> float:
    usual = 3e-3 if config.model.path == "tiny" else 1e-4 if config.model.lora_rank else 1e-5
    return config.warm_start.lr or usual


def compute_dtype(config: Config) -> str:
    """The type that models compute in."""
    on_gpu = bool(config.cluster.gpus_per_node)
    return config.model.dtype if config.model.dtype != "auto" else ("bfloat16" if on_gpu else "float32")


def data_sources(config: Config) -> list[str]:
    return [config.data.train] if isinstance(config.data.train, str) else list(config.data.train)


# -- teachers ----------------------------------------------------------------------------------------------------------

STUDENT = "student"  # as a teacher's path: the student at its start


def student_teachers(config: Config) -> list[str]:
    """Teachers that are the student's own initial weights."""
    return [name for name, teacher in config.teachers.items() if teacher.path == STUDENT]


def task_teachers(config: Config) -> dict[str, str]:
    """Teachers that are made for a task, with the task's name."""
    paths = {name: teacher.path for name, teacher in config.teachers.items()}
    return {name: path.removeprefix(TASK) for name, path in paths.items() if path.startswith(TASK)}


def named_models(config: Config) -> dict[str, str]:
    """Teachers that are models of their own, with their folders or hub names."""
    made = {*student_teachers(config), *task_teachers(config)}
    return {name: teacher.path for name, teacher in config.teachers.items() if name not in made}


def teacher_shape(config: Config, name: str) -> ModelShape | None:
    """The shape of a teacher's model; teachers that are made have the student's."""
    path = named_models(config).get(name)
    return model_shape(config) if path is None else shape_of(path)


def teacher_context_tokens(config: Config, name: str) -> int:
    """Tokens of the longest sequence that a teacher's engine accepts."""
    teacher = config.teachers[name]
    if teacher.max_context_tokens:
        return teacher.max_context_tokens
    needed = teacher_needs_tokens(config, name)
    shape = teacher_shape(config, name)
    room = context_tokens(config) if teacher.prompt else 0  # for the part of its prompt that the student's lacks
    return needed + (min(room, max(0, shape.context - needed)) if shape and shape.context else room)


def teacher_needs_tokens(config: Config, name: str) -> int:
    """Tokens of the longest row and the one after it, with the fixed text of the teacher's own prompt."""
    fixed = re.sub(r"\{[^{}]*\}", "", config.teachers[name].prompt)
    return context_tokens(config) + 1 + len(fixed.split())


def teacher_rows(config: Config) -> int:
    """Sequences that a teacher's engine scores at once. On CPUs its cache has room for all of them from the start."""
    return 256 if config.distillation.gpus_per_node else config.distillation.batch_rows


def routes_rows(config: Config) -> bool:
    """Whether a column chooses the teacher of a row. A single teacher without `match` scores all rows."""
    return len(config.teachers) > 1 or any(teacher.match for teacher in config.teachers.values())
