"""Prompts and responses fit the engine, the model and a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import (
    context_tokens,
    is_agent,
    model_shape,
    section_of,
    tokens_of_forward,
    worker_roles,
)


@check("data.max_prompt_tokens", "rollout.*")
def responses_fit_the_engine(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    limit, response = config.rollout.max_context_tokens, config.rollout.max_new_tokens
    prompt = config.data.max_prompt_tokens
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
            f"one turn may have {response} tokens; the limit is {limit} including the prompt",
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
    """A row is never cut into several forwards, so the longest one must fit in one."""
    config, needed = context.config, context_tokens(context.config)
    for role in worker_roles(config):
        key = f"{role}.micro_batch_tokens"
        limit = tokens_of_forward(config, role)
        if limit < needed:
            together = section_of(config, role).context_parallel
            share = -(-needed // together)
            yield context.report(
                "E208",
                f"{role}: a row may have {needed} tokens, and one forward takes {limit}",
                (key, "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"at least {share}" + (f", because {together} ranks share a row" if together > 1 else ""),
                fix=f"set {key} = {share}, or shorten prompts or responses",
            )


@check("reward.*", "rollout.max_new_tokens")
def overlong_buffer_fits(context: Context) -> Iterator[Diagnostic]:
    buffer, longest = context.config.reward.overlong_buffer, context.config.rollout.max_new_tokens
    if buffer >= longest:
        yield context.report(
            "E209",
            f"the last {buffer} tokens are penalised, and a response has at most {longest}: every response would be",
            ("reward.overlong_buffer", "rollout.max_new_tokens"),
            allowed=f"less than {longest}",
            fix=f"set reward.overlong_buffer = {longest // 4}",
        )
