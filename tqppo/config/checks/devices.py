"""The cluster has the GPUs that roles and engine replicas need."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import worker_roles
from tqppo.config.placement import placement_of, ranks_per_copy
from tqppo.config.sections import Config
from tqppo.engines.capabilities import capabilities_of


@check("rollout.*", "cluster.*")
def replicas_fit_a_node(context: Context) -> Iterator[Diagnostic]:
    rollout, cluster = context.config.rollout, context.config.cluster
    size, gpus = rollout.tensor_parallel, cluster.gpus_per_node
    if rollout.endpoints or size == 1 or size <= gpus:
        return
    able = capabilities_of(rollout.backend)
    if able is not None and not able.tensor_parallel:
        return  # E402 reports that
    yield context.report(
        "E406",
        f"a replica of {size} GPUs does not fit on a node with {gpus}",
        ("rollout.tensor_parallel", "cluster.gpus_per_node"),
        allowed=f"1 to {gpus}" if gpus else "1 without GPUs",
        fix=f"set rollout.tensor_parallel = {max(1, gpus)}, or cluster.gpus_per_node = {size}",
    )


@check("mode", "cluster.*", "rollout.*", "actor.ranks", "critic.ranks", "reference.*", "reward_model.*", "algorithm.*")
def devices_suffice(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    total = config.cluster.nodes * config.cluster.gpus_per_node
    if not total:
        return
    needs = gpu_needs(config)
    most = max(needs, key=lambda key: needs[key])
    keys = ("cluster.gpus_per_node", "cluster.nodes", *needs)
    shape = f"{config.cluster.nodes} × {config.cluster.gpus_per_node} = {total} GPUs"
    if config.cluster.colocate and needs[most] > total:
        works = nearest_numbers(total, lambda n: total % n == 0, at_most=total)
        message = f"{most.partition('.')[0]} needs {needs[most]} GPUs, and there are {total}"
        keys, fix = (most, *keys[:2]), f"set {most} = {works}, or more nodes"
        yield context.report("E407", message, keys, found=shape, allowed=f"at most {total}", fix=fix)
    elif not config.cluster.colocate and sum(needs.values()) > total:
        arithmetic = " + ".join(f"{key.partition('.')[0]} {n}" for key, n in needs.items())
        message = f"each role has its own GPUs: {arithmetic} = {sum(needs.values())}, and there are {total}"
        fix = "set cluster.colocate = true, or more nodes, or fewer ranks"
        yield context.report("E407", message, keys, found=shape, allowed=f"at most {total}", fix=fix)
    else:
        yield from _gaps(context, shape)


@check("cluster.*", "rollout.*", "actor.ranks", "critic.ranks", "reference.*", "reward_model.*", "mode", "algorithm.*")
def nodes_hold_equal_shares(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for role, ranks in worker_roles(config).items() if config.cluster.shard_within_nodes else ():
        if ranks_per_copy(config, role) == 0:
            yield context.report(
                "E425",
                f"nodes have different numbers of the {ranks} ranks of {role}, and so cannot hold a copy each",
                ("cluster.shard_within_nodes", f"{role}.ranks", "cluster.nodes", "cluster.gpus_per_node"),
                allowed="as many ranks on every node",
                fix=f"set {role}.ranks to a multiple of the ranks per node, or cluster.shard_within_nodes = false",
            )


def _gaps(context: Context, shape: str) -> Iterator[Diagnostic]:
    """Problems of a sum that is right: replicas that leave gaps on every node, and GPUs without work."""
    config = context.config
    placement = placement_of(config)
    keys = ("cluster.gpus_per_node", "cluster.nodes")
    for role, count in placement.unplaced.items():
        size = config.rollout.tensor_parallel
        message = f"{count} of the {role} processes have no GPU: replicas of {size} leave gaps on nodes of {shape}"
        fix = "set rollout.tensor_parallel to a divisor of cluster.gpus_per_node"
        yield context.report("E407", message, ("rollout.tensor_parallel", *keys), found=shape, fix=fix)
    idle = [device for device in placement.idle if device.node < config.cluster.nodes]
    if idle and not placement.unplaced and config.cluster.gpus_per_node:
        message = f"{len(idle)} of {shape} have nothing to do"
        fix = "more ranks and replicas, or fewer nodes or GPUs per node"
        yield context.report("W407", message, keys, found=shape, allowed="", fix=fix)


@check("mode", "cluster.*", "rollout.*", "actor.ranks", "critic.ranks", "reference.*", "reward_model.*", "algorithm.*")
def engines_ahead_have_their_own_gpus(context: Context) -> Iterator[Diagnostic]:
    """Engines that sample while trainers compute cannot take turns with them."""
    config = context.config
    sharing = sorted(placement_of(config).neighbours("rollout")) if config.rollout.ahead else []
    if sharing:
        total = sum(gpu_needs(config).values())
        yield context.report(
            "E424",
            f"engines that sample ahead work while trainers do, and these share their GPUs with {', '.join(sharing)}",
            ("rollout.ahead", "cluster.colocate", "cluster.gpus_per_node"),
            allowed="0 with cluster.colocate = true",
            fix=f"set rollout.ahead = 0, or cluster.colocate = false with {total} GPUs: one for each process",
        )


def gpu_needs(config: Config) -> dict[str, int]:
    """GPUs of each role, by the key that sets their number. Teachers have a pool of their own."""
    needs = {f"{role}.ranks": ranks for role, ranks in worker_roles(config).items()}
    if not config.rollout.endpoints:
        needs["rollout.replicas"] = config.rollout.replicas * config.rollout.tensor_parallel
    return needs
