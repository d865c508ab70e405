"""Finds columns that a stage reads and no earlier stage writes, with the settings that cause it."""

from __future__ import annotations

from dataclasses import dataclass

from tqppo import columns
from tqppo.config import facts
from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class Gap:
    """A column that `reader` reads and no earlier stage writes. `keys` cause it, `fix` avoids it."""

    code: str
    reader: str
    column: str
    reason: str
    keys: tuple[str, ...]
    allowed: str
    fix: str


def missing_columns(config: Config) -> list[Gap]:
    """Every missing column once, at the first stage that reads it."""
    features = facts.features(config)
    made: set[str] = set()
    gaps: dict[str, Gap] = {}
    for stage in facts.stages(config):
        for name in stage.reads(features):
            assert name in columns.declared(), f"stage {stage.name} reads an undeclared column {name!r}"
            if name not in made and name not in gaps:
                gaps[name] = _gap(stage.name, name, config)
        made.update(stage.writes(features))
    if facts.has_teachers(config) and not config.teachers:  # E501 reports that
        gaps = {name: gap for name, gap in gaps.items() if not name.startswith("teacher_")}
    return list(gaps.values())


def _gap(reader: str, name: str, config: Config) -> Gap:
    if name == "values":
        return Gap(
            "E301",
            "the advantage estimator gae",
            name,
            f"no stage writes in mode {config.mode}: it comes from a critic",
            ("algorithm.advantage", "mode"),
            'gae in mode "ppo"; grpo, dr_grpo, rloo, … elsewhere',
            'set mode = "ppo", or algorithm.advantage = "grpo"',
        )
    if name == "model_score":
        return Gap(
            "E310",
            "algorithm.filter_groups",
            name,
            "the reward_model stage writes only after the groups are chosen",
            ("algorithm.filter_groups", "reward_model.path"),
            "dynamic sampling with a reward function",
            "set algorithm.filter_groups = false, or delete reward_model.path",
        )
    if name == "sum_pi_squared":
        return Gap(
            "E310",
            f"the advantage estimator {config.algorithm.advantage}",
            name,
            "the trainer computes with the old log-probabilities, and old_logprobs takes the engine's",
            ("algorithm.advantage", "algorithm.old_logprobs"),
            'algorithm.old_logprobs = "recompute"',
            "delete algorithm.old_logprobs, or use another estimator",
        )
    return Gap("E310", reader, name, "no earlier stage writes", ("mode",), "", "")
