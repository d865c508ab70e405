"""Models have shapes that can be built and served, and vocabularies that agree."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import has_critic, model_shape
from tqppo.config.plan.shapes import shape_of

SERVED_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


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


@check("model.*", "rollout.backend")
def tiny_heads_can_be_served(context: Context) -> Iterator[Diagnostic]:
    model, backend = context.config.model, context.config.rollout.backend
    if model.path != "tiny" or backend not in ("vllm", "sglang") or model.hidden_size % model.num_heads:
        return
    size = model.hidden_size // model.num_heads
    if size not in SERVED_HEADS:
        fits = [model.hidden_size // each for each in SERVED_HEADS if model.hidden_size % each == 0]
        fix = f"set model.num_heads = {max(fits)}" if fits else "set model.hidden_size = 64 and model.num_heads = 2"
        yield context.report(
            "E413",
            f"{backend} cannot serve attention heads of size {size}",
            ("model.num_heads", "model.hidden_size", "rollout.backend"),
            found=f"hidden_size / num_heads = {model.hidden_size} / {model.num_heads} = {size}",
            allowed=", ".join(map(str, SERVED_HEADS)),
            fix=fix,
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
