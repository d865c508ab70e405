"""Settings of the algorithm do not contradict each other, and every column is written before it is read."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config import facts
from tqppo.config.checks.columns import missing_columns
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic


@check("mode", "algorithm.*", "reward_model.path", "distillation.*", "teachers.*")
def columns_are_written_before_they_are_read(context: Context) -> Iterator[Diagnostic]:
    for gap in missing_columns(context.config):
        yield context.report(
            gap.code,
            f"{gap.reader} reads the column {gap.column}, which {gap.reason}",
            gap.keys,
            allowed=gap.allowed,
            fix=gap.fix,
        )


@check("mode", "algorithm.advantage")
def ppo_uses_its_critic(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    if facts.has_critic(config) and config.algorithm.advantage != "gae":
        yield context.report(
            "E302",
            f"mode {config.mode} trains a critic, and {config.algorithm.advantage} would not use it",
            ("algorithm.advantage", "mode"),
            allowed='algorithm.advantage = "gae" in a mode with a critic',
            fix='delete algorithm.advantage, or use mode = "grpo"',
        )


@check("algorithm.old_logprobs", "algorithm.correction", "algorithm.reject")
def corrections_have_two_sides(context: Context) -> Iterator[Diagnostic]:
    algorithm = context.config.algorithm
    for key in ("correction", "reject"):
        if algorithm.old_logprobs == "rollout" and getattr(algorithm, key) != "none":
            yield context.report(
                "E304",
                f"{key} compares trainer and engine, and old_logprobs takes the engine's log-probabilities for both",
                (f"algorithm.{key}", "algorithm.old_logprobs"),
                allowed='algorithm.old_logprobs = "recompute"',
                fix=f'delete old_logprobs, or set {key} = "none"',
            )


@check("mode", "rollout.ahead", "algorithm.*", "distillation.*")
def losses_know_who_sampled(context: Context) -> Iterator[Diagnostic]:
    """Recomputed log-probabilities are those of weights later than the ones that sampled ahead of training."""
    config, features = context.config, facts.features(context.config)
    is_corrected = features.has_correction_weights or features.has_loss_mask
    if config.rollout.ahead and features.needs_old_policy and features.recomputes_old_logprobs and not is_corrected:
        yield context.report(
            "W314",
            "the loss compares with weights that did not sample the groups: old_logprobs are recomputed, "
            f"{config.rollout.ahead} versions later",
            ("algorithm.old_logprobs", "rollout.ahead"),
            allowed='"rollout", or "recompute" with a correction or rejection',
            fix='set algorithm.old_logprobs = "rollout", or algorithm.correction = "token"',
        )


@check("mode", "distillation.*")
def k1_is_not_supervised(context: Context) -> Iterator[Diagnostic]:
    section = context.config.distillation
    if facts.has_teachers(context.config) and section.loss == "k1" and section.update == "supervised":
        yield context.report(
            "E305",
            "the gradient of k1 does not depend on the teacher, so it cannot be trained on directly",
            ("distillation.loss", "distillation.update"),
            allowed='k3, k2, abs, a top-k or a whole-vocabulary loss with update = "supervised"',
            fix='set distillation.loss = "k3" or "forward_kl_topk", or distillation.update = "policy_gradient"',
        )


@check("mode", "distillation.*")
def sums_over_tokens_are_supervised(context: Context) -> Iterator[Diagnostic]:
    section = context.config.distillation
    sums = facts.uses_top_k(context.config) or section.loss in facts.WHOLE_VOCABULARY
    if facts.has_teachers(context.config) and sums and section.update == "policy_gradient":
        yield context.report(
            "W311",
            f"{section.loss} sums over tokens that were not sampled, which is a poor advantage for the sampled one",
            ("distillation.update", "distillation.loss"),
            fix='set distillation.update = "supervised", or distillation.loss = "k1"',
        )


@check("mode", "algorithm.*", "distillation.task_reward")
def kl_has_a_weight(context: Context) -> Iterator[Diagnostic]:
    config, algorithm = context.config, context.config.algorithm
    in_use = {"kl_reward": facts.kl_in_reward(config), "kl_loss": facts.kl_in_loss(config)}
    for name, is_used in in_use.items():
        coefficient = f"algorithm.{name}_coef"
        if is_used or context.value(f"algorithm.{name}") == "none" or not facts.has_policy_loss(config):
            continue
        if name == "kl_reward" and algorithm.kl_controller == "adaptive":
            yield context.report(
                "E307",
                "an adaptive β that starts at 0 stays 0: the controller multiplies it",
                (coefficient, "algorithm.kl_controller"),
                allowed="above 0",
                fix=f"set {coefficient} = 0.001",
            )
        else:
            yield context.report(
                "W306",
                f"{name} has no effect: its weight {name}_coef is 0",
                (f"algorithm.{name}", coefficient),
                fix=f'set {coefficient} = 0.001, or {name} = "none"',
            )


@check("algorithm.clip_dual")
def dual_clip_is_above_one(context: Context) -> Iterator[Diagnostic]:
    if 0 < context.config.algorithm.clip_dual <= 1:
        yield context.report(
            "E308",
            "a dual clip of 1 or less would cut the loss of every token with a negative advantage",
            ("algorithm.clip_dual",),
            allowed="above 1, or 0 for off",
            fix="set algorithm.clip_dual = 3.0",
        )


@check("algorithm.correction", "algorithm.correction_cap", "algorithm.correction_floor")
def correction_band_is_open(context: Context) -> Iterator[Diagnostic]:
    algorithm = context.config.algorithm
    if algorithm.correction == "icepop" and algorithm.correction_floor >= algorithm.correction_cap:
        yield context.report(
            "E309",
            "icepop keeps weights between floor and cap, and this floor is not below the cap",
            ("algorithm.correction_floor", "algorithm.correction_cap"),
            allowed=f"a floor below {algorithm.correction_cap:g}",
            fix="set algorithm.correction_floor = 0.5 and algorithm.correction_cap = 2.0",
        )
