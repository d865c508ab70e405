"""Arithmetic of a step: groups, mini-batches, ranks, padding, context lengths."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm

from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import (
    context_tokens,
    has_critic,
    is_agent,
    learning_roles,
    model_shape,
    required_multiple,
    worker_roles,
)
from tqppo.config.plan.memory import size
from tqppo.config.plan.plan import storage_bytes
from tqppo.config.plan.shapes import shape_of

SESSION_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")


@check("mode", "rollout.group_size", "algorithm.advantage", "distillation.task_reward")
def groups_have_sessions(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    compares = config.algorithm.advantage in SESSION_ESTIMATORS
    matters = config.mode == "grpo" or (config.mode == "distill" and config.distillation.task_reward)
    if matters and compares and config.rollout.group_size < 2:
        yield context.report(
            "E204",
            f"{config.algorithm.advantage} compares the sessions of a prompt, and there is only one",
            ("rollout.group_size", "algorithm.advantage"),
            allowed="rollout.group_size of at least 2",
            fix='set rollout.group_size = 8, or use mode = "ppo"',
        )


@check("mode", "data.batch_size", "rollout.group_size", "actor.*", "critic.*")
def mini_batches_divide(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    batch, group = config.data.batch_size, config.rollout.group_size
    for role in learning_roles(config):
        section = getattr(config, role)
        mini, ranks, key = section.mini_batch_size, section.ranks, f"{role}.mini_batch_size"
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
        if size * group % ranks:
            yield _uneven(context, role, size)


def _uneven(context: Context, role: str, size: int) -> Diagnostic:
    config = context.config
    batch, group, ranks = config.data.batch_size, config.rollout.group_size, getattr(config, role).ranks
    key = f"{role}.mini_batch_size" if getattr(config, role).mini_batch_size else "data.batch_size"
    minis = nearest_numbers(size, lambda n: n * group % ranks == 0, at_most=max(batch, size * 2))
    rank_choices = nearest_numbers(ranks, lambda n: size * group % n == 0, at_most=ranks * 2)
    options = [f"{key} = {minis}" if minis else "", f"{role}.ranks = {rank_choices}"]
    rows = size * group
    return context.report(
        "E201",
        f"a mini-batch of {size} prompts × {group} sessions = {rows} rows cannot be shared evenly by {ranks} ranks",
        (key, "rollout.group_size", f"{role}.ranks"),
        found=f"{rows} rows / {ranks} ranks = {rows / ranks:.2f} rows each",
        allowed=f"mini-batch rows that are a multiple of {ranks}",
        fix="set " + ", or ".join(each for each in options if each),
    )


@check("mode", "data.batch_size", "rollout.group_size", "actor.*", "critic.*")
def padding_stays_small(context: Context) -> Iterator[Diagnostic]:
    """Batches are padded to a multiple that every mini-batch and rank count divides (P1)."""
    config = context.config
    batch, group = config.data.batch_size, config.rollout.group_size
    rows, multiple = batch * group, required_multiple(config)
    roles = learning_roles(config)
    minis = [getattr(config, role).mini_batch_size or batch for role in roles]
    uneven = any(mini * group % getattr(config, role).ranks for role, mini in zip(roles, minis, strict=True))
    if uneven or any(mini > batch for mini in minis) or rows % multiple == 0:
        return  # E201 and E202 tell of the first two
    padding = -rows % multiple
    keys = [f"{role}.mini_batch_size" for role in roles if getattr(config, role).mini_batch_size]
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


@check("data.max_prompt_tokens", "rollout.*")
def responses_fit_the_engine(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    limit, prompt, response = (
        config.rollout.max_context_tokens,
        config.data.max_prompt_tokens,
        config.rollout.max_new_tokens,
    )
    if limit and limit < prompt + response and not is_agent(config):
        yield context.report(
            "E206",
            f"prompt and response may have {prompt} + {response} = {prompt + response} tokens; the limit is {limit}",
            ("rollout.max_context_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens"),
            allowed=f"at least {prompt + response}, or 0 for exactly that",
            fix=f"set rollout.max_context_tokens = {prompt + response}"
            + (f", or rollout.max_new_tokens = {limit - prompt}" if limit > prompt else ""),
        )
    elif limit and is_agent(config) and limit <= response:
        yield context.report(
            "E206",
            f"one turn may have {response} tokens, and the engine takes {limit} with its prompt",
            ("rollout.max_context_tokens", "rollout.max_new_tokens"),
            allowed=f"above {response}",
            fix=f"set rollout.max_context_tokens = {prompt + response}",
        )


@check("model.*", "data.max_prompt_tokens", "rollout.*")
def context_fits_the_model(context: Context) -> Iterator[Diagnostic]:
    config, shape = context.config, model_shape(context.config)
    needed = context_tokens(config)
    if shape is not None and shape.context and needed > shape.context:
        room = shape.context - config.data.max_prompt_tokens
        yield context.report(
            "E207",
            f"{config.model.path} takes {shape.context} tokens, and a prompt with its response may have {needed}",
            ("rollout.max_new_tokens", "data.max_prompt_tokens", "rollout.max_context_tokens", "model.path"),
            allowed=f"at most {shape.context} in all",
            fix=f"set rollout.max_new_tokens = {room}" if room > 0 else "set a smaller data.max_prompt_tokens",
        )


@check("mode", "data.*", "rollout.*", "actor.*", "critic.*", "reference.*", "reward_model.*", "algorithm.*")
def rows_fit_a_micro_batch(context: Context) -> Iterator[Diagnostic]:
    """A row is never cut, so the longest one must fit in one forward."""
    config, needed = context.config, context_tokens(context.config)
    for role in worker_roles(config):
        key = f"{role}.micro_batch_tokens"
        limit = getattr(config, role).micro_batch_tokens
        if limit < needed:
            yield context.report(
                "E208",
                f"{role}: a row may have {needed} tokens, and one forward takes {limit}",
                (key, "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"at least {needed}",
                fix=f"set {key} = {needed}, or shorten prompts or responses",
            )


@check("mode", "data.*", "rollout.*", "storage.*", "algorithm.*", "distillation.*", "actor.*", "critic.*")
def a_step_fits_the_storage(context: Context) -> Iterator[Diagnostic]:
    """Columns at their longest; real rows are shorter, hence a warning."""
    needed, budget = storage_bytes(context.config)[0], context.config.storage.budget_gb * 2**30
    if needed > budget:
        yield context.report(
            "W212",
            f"a step of full-length rows takes {size(needed)}, and the storage's budget is {size(budget)} per node",
            ("storage.budget_gb", "data.batch_size", "rollout.group_size", "rollout.max_new_tokens"),
            allowed=f"at least {size(needed)} to be safe",
            fix=f"set storage.budget_gb = {ceil(needed / 2**30)}.0",
        )


@check("reward.*", "rollout.max_new_tokens")
def overlong_buffer_fits(context: Context) -> Iterator[Diagnostic]:
    buffer, longest = context.config.reward.overlong_buffer, context.config.rollout.max_new_tokens
    if buffer >= longest:
        yield context.report(
            "E209",
            f"the last {buffer} tokens are penalised, and a response has at most {longest}: every answer would be",
            ("reward.overlong_buffer", "rollout.max_new_tokens"),
            allowed=f"less than {longest}",
            fix=f"set reward.overlong_buffer = {longest // 4}",
        )


@check("model.*")
def tiny_heads_divide(context: Context) -> Iterator[Diagnostic]:
    model = context.config.model
    if model.path == "tiny" and model.hidden_size % model.num_heads:
        heads = nearest_numbers(model.num_heads, lambda n: model.hidden_size % n == 0, at_most=model.hidden_size)
        yield context.report(
            "E210",
            f"{model.num_heads} heads cannot share a width of {model.hidden_size}",
            ("model.num_heads", "model.hidden_size"),
            found=f"{model.hidden_size} / {model.num_heads} = {model.hidden_size / model.num_heads:.2f}",
            fix=f"set model.num_heads = {heads}",
        )


@check("critic.path", "reward_model.path", "mode", "model.path")
def models_have_one_vocabulary(context: Context) -> Iterator[Diagnostic]:
    """A critic reads the actor's token ids; vocabularies of known models can be compared without loading them."""
    config, own = context.config, model_shape(context.config)
    other = shape_of(config.critic.path) if has_critic(config) and config.critic.path else None
    if own and other and abs(own.vocabulary - other.vocabulary) > 1024:  # sizes of one family differ by their padding
        yield context.report(
            "E211",
            f"critic and actor have different vocabularies ({other.vocabulary} and {own.vocabulary} tokens)",
            ("critic.path", "model.path"),
            fix="use a critic of the same family",
        )
