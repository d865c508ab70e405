"""The stages of a step as data: which columns each reads and writes, and why it is there. Mirrors the trainers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqppo import columns
from tqppo.config.facts import uses_reference
from tqppo.config.sections import Config

_ROLLOUT = ("tokens", "response_mask", "rollout_logprobs", "reward")


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """A column that a stage reads and no earlier one makes; the keys that ask for it, and a way out."""

    code: str
    reader: str
    column: str
    reason: str
    keys: tuple[str, ...]
    allowed: str
    fix: str


def stages_of(config: Config) -> list[Stage]:
    """One line per stage, in the order of a step."""
    return list(_stages(config))


def _stages(config: Config) -> Iterator[Stage]:
    algorithm, is_ppo = config.algorithm, config.mode == "ppo"
    policy = config.mode != "distill" or config.distillation.task_reward
    baseline = ("baseline_reward",) if policy and algorithm.advantage == "remax" else ()
    teacher = ("teacher_ids", "teacher_logprobs") if config.mode == "distill" and config.teachers else ()
    filters = ("reward", "model_score") if algorithm.filter_groups and config.reward_model.path else ()
    yield Stage("rollout.generate", filters[1:], (*_ROLLOUT, *baseline, *teacher))
    if config.reward_model.path:
        yield Stage("reward_model.score", ("tokens",), ("model_score",))
    if algorithm.old_logprobs == "recompute" and (policy or config.distillation.update == "policy_gradient"):
        yield Stage("actor.logprobs", ("tokens", "response_mask"), ("old_logprobs",))
    if uses_reference(config):
        yield Stage("reference.logprobs", ("tokens", "response_mask"), ("ref_logprobs",))
    if is_ppo:
        yield Stage("critic.values", ("tokens", "response_mask"), ("values",))
    if policy:
        yield Stage("advantages.estimate", _estimator_reads(config), _estimator_writes(config))
    if is_ppo:
        yield Stage("critic.update", ("tokens", "response_mask", "values", "returns"), ())
    yield Stage("actor.update", _actor_reads(config, policy), ())


def _old(config: Config) -> str:
    return "old_logprobs" if config.algorithm.old_logprobs == "recompute" else "rollout_logprobs"


def _estimator_reads(config: Config) -> tuple[str, ...]:
    algorithm = config.algorithm
    corrected = algorithm.correction != "none" or algorithm.reject != "none"
    optional = {
        "model_score": bool(config.reward_model.path),
        "values": algorithm.advantage == "gae",
        "baseline_reward": algorithm.advantage == "remax",
        "ref_logprobs": algorithm.kl_reward != "none",
        _old(config): algorithm.kl_reward != "none" or corrected,
    }
    return ("reward", "response_mask", *(name for name, wanted in optional.items() if wanted))


def _estimator_writes(config: Config) -> tuple[str, ...]:
    algorithm = config.algorithm
    optional = {
        "returns": config.mode == "ppo",
        "correction_weights": algorithm.correction != "none",
        "loss_mask": algorithm.reject != "none",
        "session_weight": algorithm.aggregate == "session-mean",
    }
    return ("advantages", *(name for name, wanted in optional.items() if wanted))


def _actor_reads(config: Config, policy: bool) -> tuple[str, ...]:
    algorithm, distill = config.algorithm, config.mode == "distill"
    optional = {
        _old(config): policy or config.distillation.update == "policy_gradient",
        "advantages": policy,
        "ref_logprobs": policy and algorithm.kl_loss != "none",
        "correction_weights": policy and algorithm.correction != "none",
        "loss_mask": policy and algorithm.reject != "none",
        "session_weight": policy and algorithm.aggregate == "session-mean",
        "teacher_ids": distill and config.distillation.loss.endswith("_topk"),
        "teacher_logprobs": distill,
    }
    return ("tokens", "response_mask", *(name for name, wanted in optional.items() if wanted))


def missing_columns(config: Config) -> list[Gap]:
    """Each column once, at the first stage that misses it."""
    made: set[str] = set()
    gaps: dict[str, Gap] = {}
    for stage in stages_of(config):
        for name in stage.reads:
            assert name in columns.declared(), f"stage {stage.name} reads an undeclared column {name!r}"
            if name not in made and name not in gaps:
                gaps[name] = _gap(stage.name, name, config)
        made.update(stage.writes)
    if config.mode == "distill" and not config.teachers:  # E501 tells of that
        gaps = {name: gap for name, gap in gaps.items() if not name.startswith("teacher_")}
    return list(gaps.values())


def _gap(reader: str, name: str, config: Config) -> Gap:
    if name == "values":
        return Gap(
            "E301",
            "the advantage estimator gae",
            name,
            f"no stage makes in mode {config.mode}: it comes from a critic",
            ("algorithm.advantage", "mode"),
            'gae in mode "ppo"; grpo, dr_grpo, rloo, … elsewhere',
            'set mode = "ppo", or algorithm.advantage = "grpo"',
        )
    if name == "model_score":
        return Gap(
            "E310",
            "algorithm.filter_groups",
            name,
            "is made only after the groups have been chosen (by the reward_model stage)",
            ("algorithm.filter_groups", "reward_model.path"),
            "dynamic sampling with a reward function",
            "set algorithm.filter_groups = false, or take reward_model.path out",
        )
    if name == "session_weight":
        return Gap(
            "E310",
            reader,
            name,
            "no earlier stage makes",
            ("algorithm.aggregate", "mode"),
            "",
            'set algorithm.aggregate = "token-mean"',
        )
    return Gap("E310", reader, name, "no earlier stage makes", ("mode",), "", "")
