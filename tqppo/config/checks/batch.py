"""The arithmetic of a step: groups, mini-batches, ranks, padding, storage."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm

from tqppo.columns import rows_of_padding
from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import (
    has_critic,
    has_policy_loss,
    learning_roles,
    optimizer_of,
    required_multiple,
    row_shares,
    storage_budget_bytes,
)
from tqppo.config.plan.storage import storage_bytes
from tqppo.units import GIB, size

SESSION_ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "gigpo",
)


@check("mode", "rollout.group_size", "algorithm.advantage", "distillation.task_reward")
def groups_have_sessions(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    compares = config.algorithm.advantage in SESSION_ESTIMATORS
    if has_policy_loss(config) and not has_critic(config) and compares and config.rollout.group_size < 2:
        yield context.report(
            "E204",
            f"{config.algorithm.advantage} compares the sessions of a prompt, and there is only one",
            ("rollout.group_size", "algorithm.advantage"),
            allowed="rollout.group_size of at least 2",
            fix='set rollout.group_size = 8, or use mode = "ppo"',
        )


@check("rollout.group_size", "algorithm.filter_groups")
def filtered_groups_can_differ(context: Context) -> Iterator[Diagnostic]:
    if context.config.algorithm.filter_groups and context.config.rollout.group_size < 2:
        yield context.report(
            "E415",
            "filter_groups drops groups whose sessions all have the same reward, and a group of one always does",
            ("algorithm.filter_groups", "rollout.group_size"),
            allowed="rollout.group_size of at least 2",
            fix="set rollout.group_size = 8, or filter_groups = false",
        )


@check("mode", "data.batch_size", "rollout.group_size", "actor.*", "critic.*")
def mini_batches_divide(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    batch, group = config.data.batch_size, config.rollout.group_size
    for role in learning_roles(config):
        section = optimizer_of(config, role)
        mini, shares, key = section.mini_batch_size, row_shares(config, role), f"{role}.mini_batch_size"
        if mini > batch:
            yield context.report(
                "E202",
                f"a mini-batch of {mini} prompts does not fit in a batch of {batch}",
                (key, "data.batch_size"),
                allowed=f"1 to {batch}, or 0 for the whole batch",
                fix=f"set {key} = {nearest_numbers(min(mini, batch), lambda n: batch % n == 0, at_most=batch)}",
            )
            continue
        size = mini or batch
        if size * group % shares:
            yield _uneven(context, role, size)


def _uneven(context: Context, role: str, size: int) -> Diagnostic:
    config = context.config
    batch, group, section = config.data.batch_size, config.rollout.group_size, optimizer_of(config, role)
    shares, together = row_shares(config, role), section.context_parallel
    key = f"{role}.mini_batch_size" if section.mini_batch_size else "data.batch_size"
    minis = nearest_numbers(size, lambda n: n * group % shares == 0, at_most=max(batch, size * 2))
    ranks = section.ranks
    rank_choices = nearest_numbers(
        ranks, lambda n: n % together == 0 and size * group % (n // together) == 0, at_most=ranks * 2
    )
    options = [f"{key} = {minis}" if minis else "", f"{role}.ranks = {rank_choices}"]
    rows, who = size * group, f"{ranks} ranks" if together == 1 else f"{shares} groups of {together} ranks"
    return context.report(
        "E201",
        f"a mini-batch of {size} prompts × {group} sessions = {rows} rows cannot be shared evenly by {who}",
        (key, "rollout.group_size", f"{role}.ranks"),
        found=f"{rows} rows / {who} = {rows / shares:.2f} rows each",
        allowed=f"mini-batch rows that are a multiple of {shares}",
        fix="set " + ", or ".join(each for each in options if each),
    )


@check("mode", "data.batch_size", "rollout.group_size", "actor.*", "critic.*")
def padding_stays_small(context: Context) -> Iterator[Diagnostic]:
    """A batch is padded to a multiple of every rank count and of every mini-batch's rows."""
    config = context.config
    batch, group = config.data.batch_size, config.rollout.group_size
    rows, multiple = batch * group, required_multiple(config)
    sections = {role: optimizer_of(config, role) for role in learning_roles(config)}
    minis = [section.mini_batch_size or batch for section in sections.values()]
    uneven = any(mini * group % row_shares(config, role) for role, mini in zip(sections, minis, strict=True))
    if uneven or any(mini > batch for mini in minis) or rows % multiple == 0:
        return  # E201 and E202 report the first two
    padding = rows_of_padding(rows, multiple)
    keys = [f"{role}.mini_batch_size" for role, section in sections.items() if section.mini_batch_size]
    keys = [*keys, "data.batch_size", "rollout.group_size"]
    common = lcm(*minis)
    works = nearest_numbers(batch, lambda n: n % common == 0, at_most=batch + common)
    code, aside = ("W203", ", which is more than the batch") if multiple > rows else ("W205", "")
    yield context.report(
        code,
        f"each step's {rows} rows are padded with {padding} ({padding / rows:.0%}) to a multiple of {multiple}{aside}",
        keys,
        found=f"{rows} rows, required multiple {multiple}",
        fix=f"set data.batch_size = {works}, or mini-batch sizes that divide {batch}",
    )


@check("mode", "data.*", "rollout.*", "storage.*", "algorithm.*", "distillation.*", "actor.*", "critic.*")
def a_step_fits_the_storage(context: Context) -> Iterator[Diagnostic]:
    """Only a warning: the estimate takes every row at its full length, and most are shorter."""
    steps = context.config.rollout.ahead + 1  # rows of so many steps are in the queue at a time
    needed, budget = steps * storage_bytes(context.config)[0], storage_budget_bytes(context.config)
    if needed > budget:
        what = "a step" if steps == 1 else f"{steps} steps (rollout.ahead)"
        yield context.report(
            "W212",
            f"{what} of full-length rows takes {size(needed)}, and the storage's budget is {size(budget)} per node",
            ("storage.budget_gb", "data.batch_size", "rollout.group_size", "rollout.max_new_tokens"),
            allowed=f"at least {size(needed)} to be safe",
            fix=f"set storage.budget_gb = {ceil(needed / GIB)}.0",
        )
