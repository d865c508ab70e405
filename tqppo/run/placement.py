"""Who asks Ray for how much: the roles of a run, and whether the cluster has it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tqppo.config.sections import Config
from tqppo.run.resources import Demand


@dataclass(frozen=True, slots=True)
class Shares:
    """What one process of any role asks for. Roles that take turns share a device; Ray must not wait for one each."""

    cpus: float
    gpus: float
    engine_gpus: float


def roles(config: Config) -> dict[str, int]:
    """Every role of the run that holds a model, with its number of processes."""
    found = {"actor": config.actor.ranks}
    if config.mode == "ppo":
        found["critic"] = config.critic.ranks
    if needs_reference(config) and not config.model.lora_rank:
        found["reference"] = config.reference.ranks
    if config.reward_model.path:
        found["reward_model"] = config.reward_model.ranks
    found["rollout"] = len(config.rollout.endpoints) or config.rollout.replicas
    return found


def shares(config: Config) -> Shares:
    cluster, sharing = config.cluster, len(roles(config)) if config.cluster.colocate else 1
    gpus = 1.0 / sharing if cluster.gpus_per_node else 0.0
    return Shares(cluster.cpus_per_worker / sharing, gpus, gpus * config.rollout.tensor_parallel)


def demands(config: Config) -> list[Demand]:
    share = shares(config)
    return [
        Demand(role, count, share.cpus, share.engine_gpus if role == "rollout" else share.gpus)
        for role, count in roles(config).items()
    ]


def needs_reference(config: Config) -> bool:
    """Whether a KL is measured anywhere."""
    algorithm = config.algorithm
    in_reward = algorithm.kl_reward != "none" and algorithm.kl_reward_coef > 0
    in_loss = algorithm.kl_loss != "none" and algorithm.kl_loss_coef > 0
    return in_reward or in_loss
