"""Back ends that exist, features that they have, devices that suffice, tasks and agents by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tqppo import plugins
from tqppo.builtin import (
    AGENTS,
    DATA_FILES,
    REWARDS,
    STORAGES,
    TASKS,
    check_task_arguments,
    task_arguments,
)
from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import data_sources, has_own_reference, learning_roles
from tqppo.config.read.nearest import did_you_mean, nearest
from tqppo.config.sections import Config
from tqppo.engines.capabilities import BUILT_IN, capabilities_of, instead_of
from tqppo.errors import TqppoError

SERVED_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@cache
def installed(kind: str) -> list[str]:
    """Names of back ends: registered ones, and ours (which an uninstalled checkout does not register)."""
    return list(dict.fromkeys([*plugins.names(kind), *(BUILT_IN if kind == "rollout" else STORAGES)]))


def unknown_backend(context: Context, key: str, kind: str) -> Iterator[Diagnostic]:
    name, known = context.value(key), installed(kind)
    if name not in known:
        yield context.report(
            "E401",
            f'there is no {kind} back end called "{name}"',
            (key,),
            found=f'"{name}"',
            allowed=", ".join(known),
            fix=did_you_mean(name, known) or "`tqppo backends list` shows what is installed",
        )


@check("rollout.backend", names=True)
def engine_exists(context: Context) -> Iterator[Diagnostic]:
    yield from unknown_backend(context, "rollout.backend", "rollout")


@check("storage.backend", names=True)
def storage_exists(context: Context) -> Iterator[Diagnostic]:
    yield from unknown_backend(context, "storage.backend", "storage")


@check("rollout.*")
def engine_has_what_is_asked(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    able = capabilities_of(rollout.backend)
    if able is None:
        return
    asked = {
        "tensor_parallel": (rollout.tensor_parallel > 1 and not able.tensor_parallel, "cannot split a model over GPUs"),
        "endpoints": (bool(rollout.endpoints) and not able.attach, "runs in our own process, and has no servers"),
        "python": (bool(rollout.python) and not able.needs_environment, "needs no environment of its own"),
        "weight_sync": (rollout.weight_sync == "broadcast" and not able.broadcast, "joins no process group"),
        "engine_args": (bool(rollout.engine_args) and not able.needs_environment, "takes no engine_args"),
    }
    for name, (lacking, why) in asked.items():
        if lacking:
            others = [each for each, can in BUILT_IN.items() if can.attach]
            yield context.report(
                "E402",
                f"rollout.{name}: the engine {rollout.backend} {why}",
                (f"rollout.{name}", "rollout.backend"),
                allowed=f"with {' or '.join(others)}",
                fix=f'delete rollout.{name}, or set rollout.backend = "{others[0]}"',
            )


@check("rollout.backend", "rollout.engine_args")
def engine_args_are_the_users_to_set(context: Context) -> Iterator[Diagnostic]:
    backend = context.config.rollout.backend
    for name in context.config.rollout.engine_args:
        if fix := instead_of(backend, name):
            keys = (f"rollout.engine_args.{name}", "rollout.backend")
            message = f"rollout.engine_args: tqppo itself sets the {name} of {backend}"
            yield context.report("E417", message, keys, found=name, fix=fix, on_key=True)


@check("rollout.backend", "run.deterministic")
def determinism_is_possible(context: Context) -> Iterator[Diagnostic]:
    able = capabilities_of(context.config.rollout.backend)
    asked = context.config.run.deterministic and context.origin("run.deterministic") is not None
    if asked and able is not None and not able.deterministic:
        yield context.report(
            "W403",
            f"{context.config.rollout.backend} does not promise the same bytes for the same seed",
            ("run.deterministic", "rollout.backend"),
            fix='set run.deterministic = false, or rollout.backend = "embedded"',
        )


@check("rollout.endpoints", "rollout.replicas")
def endpoints_are_addresses(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    for each in rollout.endpoints:
        if not each.startswith(("http://", "https://")):
            fix = f'write "http://{each}"'
            message, allowed = f'"{each}" is not the address of a server', "http://host:port"
            yield context.report("E405", message, ("rollout.endpoints",), allowed=allowed, fix=fix)
    if rollout.endpoints and rollout.replicas not in (1, len(rollout.endpoints)):
        yield context.report(
            "E404",
            f"{len(rollout.endpoints)} servers are attached, and {rollout.replicas} replicas asked for",
            ("rollout.replicas", "rollout.endpoints"),
            allowed=f"{len(rollout.endpoints)}: one replica per server",
            fix="delete rollout.replicas",
        )


@check("rollout.*", "cluster.*")
def replicas_fit_a_node(context: Context) -> Iterator[Diagnostic]:
    rollout, cluster = context.config.rollout, context.config.cluster
    size, gpus = rollout.tensor_parallel, cluster.gpus_per_node
    if rollout.endpoints or size == 1 or size <= gpus:
        return
    able = capabilities_of(rollout.backend)
    if able is not None and not able.tensor_parallel:
        return  # E402 tells of that
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
    needs = dict(gpu_needs(config))
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


def gpu_needs(config: Config) -> Iterator[tuple[str, int]]:
    """GPUs per role, under the key that says so; teachers have a pool of their own."""
    for role in learning_roles(config):
        yield f"{role}.ranks", getattr(config, role).ranks
    if has_own_reference(config):
        yield "reference.ranks", config.reference.ranks
    if config.reward_model.path:
        yield "reward_model.ranks", config.reward_model.ranks
    if not config.rollout.endpoints:
        yield "rollout.replicas", config.rollout.replicas * config.rollout.tensor_parallel


@check("rollout.agent", names=True)
def agent_exists(context: Context) -> Iterator[Diagnostic]:
    name = context.config.rollout.agent
    if name not in AGENTS and ":" not in name:
        yield context.report(
            "E408",
            f'there is no agent called "{name}"',
            ("rollout.agent",),
            allowed=", ".join(AGENTS) + ', or your own as "module:Class" or "file.py:Class"',
            fix=did_you_mean(name, AGENTS) or f'write "{name}:Class" if {name} is a module of yours',
        )


@check("data.train", "validation.data", names=True)
def data_is_named_rightly(context: Context) -> Iterator[Diagnostic]:
    for key in ("data.train", "validation.data"):
        value = context.value(key)
        for each in [value] if isinstance(value, str) else value:
            yield from _data_name(context, key, each)
    if not data_sources(context.config) or data_sources(context.config) == [""]:
        fix = 'write data.train = "task:sort", or the path of a file'
        yield context.report("E409", "data.train is empty: there is nothing to train on", ("data.train",), fix=fix)


def _data_name(context: Context, key: str, each: str) -> Iterator[Diagnostic]:
    kind, colon, name = each.partition(":")
    if kind == "task" and colon and name not in TASKS:
        close = nearest(name, TASKS, limit=1)
        yield context.report(
            "E409",
            f'there is no task called "{name}"',
            (key,),
            allowed=", ".join(f"task:{known}" for known in TASKS),
            fix=f'did you mean "task:{close[0]}"?' if close else "see the README's list of tasks",
        )
    elif each and kind not in ("task", "gym") and not each.endswith(DATA_FILES):
        fix = f'did you mean "task:{each}"?' if each in TASKS else "convert it to JSONL or parquet"
        message = f'{key}: "{each}" is neither a task nor a file that can be read'
        allowed = f"task:NAME, gym:NAME, or a file that ends in {', '.join(DATA_FILES)}"
        yield context.report("E411", message, (key,), found=f'"{each}"', allowed=allowed, fix=fix)


@check("data.train", "data.task_args")
def task_takes_its_arguments(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    names = [each.partition(":")[2] for each in data_sources(config) if each.startswith("task:")]
    for name in names:
        if name not in TASKS or not config.data.task_args:
            continue
        known = list(task_arguments(name))
        unknown = [each for each in config.data.task_args if each not in known]
        for each in unknown:
            key, fix = f"data.task_args.{each}", did_you_mean(each, known)
            message, keys = f'the task {name} has no argument called "{each}"', (key, "data.train")
            yield context.report("E410", message, keys, found=each, allowed=", ".join(known), fix=fix, on_key=True)
        if not unknown:
            yield from _task_values(context, name)


def _task_values(context: Context, name: str) -> Iterator[Diagnostic]:
    try:
        check_task_arguments(name, context.config.data.task_args)
    except TqppoError as error:
        yield context.report("E410", str(error), ("data.task_args", "data.train"))


@check("reward.function", names=True)
def reward_exists(context: Context) -> Iterator[Diagnostic]:
    name = context.config.reward.function
    if name and ":" not in name and name not in REWARDS:
        yield context.report(
            "E416",
            f'there is no reward function called "{name}"',
            ("reward.function",),
            allowed=", ".join(REWARDS) + ', or your own as "module:function" or "file.py:function"',
            fix=did_you_mean(name, REWARDS) or f'write "{name}:function" if {name} is a module of yours',
        )


@check("model.*", "rollout.backend")
def tiny_heads_can_be_served(context: Context) -> Iterator[Diagnostic]:
    model, backend = context.config.model, context.config.rollout.backend
    if model.path != "tiny" or backend not in ("vllm", "sglang") or model.hidden_size % model.num_heads:
        return
    size = model.hidden_size // model.num_heads
    if size not in SERVED_HEADS:
        fits = [n for n in range(1, model.hidden_size + 1) if model.hidden_size / n in SERVED_HEADS]
        fix = f"set model.num_heads = {fits[-1]}" if fits else "set model.hidden_size = 64 and model.num_heads = 2"
        yield context.report(
            "E413",
            f"{backend} cannot serve attention heads of size {size}",
            ("model.num_heads", "model.hidden_size", "rollout.backend"),
            found=f"hidden_size / num_heads = {model.hidden_size} / {model.num_heads} = {size}",
            allowed=", ".join(map(str, SERVED_HEADS)),
            fix=fix,
        )


@check("checkpoint.*")
def kept_checkpoints_are_made(context: Context) -> Iterator[Diagnostic]:
    section = context.config.checkpoint
    if section.keep_every and (not section.interval or section.keep_every % section.interval):
        works = nearest_numbers(section.keep_every, lambda n: n % max(section.interval, 1) == 0, at_most=10**6)
        yield context.report(
            "E414",
            f"no checkpoint is saved at multiples of {section.keep_every}: the interval is {section.interval} steps",
            ("checkpoint.keep_every", "checkpoint.interval"),
            allowed="a multiple of checkpoint.interval",
            fix=f"set checkpoint.keep_every = {works}" if section.interval else "set checkpoint.interval",
        )


@check("rollout.group_size", "algorithm.filter_groups")
def filtered_groups_can_differ(context: Context) -> Iterator[Diagnostic]:
    if context.config.algorithm.filter_groups and context.config.rollout.group_size < 2:
        yield context.report(
            "E415",
            "filter_groups drops groups whose sessions have one reward, and a group of one always has",
            ("algorithm.filter_groups", "rollout.group_size"),
            allowed="rollout.group_size of at least 2",
            fix="set rollout.group_size = 8, or filter_groups = false",
        )
