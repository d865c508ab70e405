"""Every loss and advantage estimator can be selected, and its options are the config's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from tqppo.algorithms.advantages import ADVANTAGES, EstimateOptions
from tqppo.algorithms.losses import POLICY_LOSSES, PolicyOptions
from tqppo.config.compile import compile_config
from tqppo.config.sections import ADVANTAGE_OPTIONS, LOSS_OPTIONS, AlgorithmSection


def allowed(setting: str) -> set[str]:
    return set(get_args(AlgorithmSection.model_fields[setting].annotation))


def test_the_config_offers_exactly_the_losses_and_estimators_of_the_tables():
    assert allowed("loss") == POLICY_LOSSES.keys() == LOSS_OPTIONS.keys()
    assert allowed("advantage") == ADVANTAGES.keys() == ADVANTAGE_OPTIONS.keys()


@pytest.mark.parametrize(("options", "table"), [(PolicyOptions, LOSS_OPTIONS), (EstimateOptions, ADVANTAGE_OPTIONS)])
def test_options_are_settings_of_the_same_name_and_default(options, table):
    section = AlgorithmSection()
    names = {each.name for each in fields(options)}
    assert names == {name for used in table.values() for name in used}
    assert {name: getattr(section, name) for name in names} == {name: getattr(options(), name) for name in names}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_a_config_with_this_loss_compiles(loss):
    assert compile_config(None, [], [f"algorithm.loss={loss}"]).ok


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_config_with_this_advantage_compiles(advantage):
    mode = "ppo" if advantage == "gae" else "grpo"
    assert compile_config(None, [], [f"mode={mode}", f"algorithm.advantage={advantage}"]).ok


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("algorithm.loss=gpg", "clip_high=0.3"),
        ("algorithm.loss=ppo", "dro_beta=0.5"),
        ("algorithm.loss=dro", "sapo_tau_positive=2.0"),
        ("algorithm.advantage=grpo", "gamma=0.9"),
        ("algorithm.advantage=rloo", "lam=0.5"),
        ("algorithm.advantage=reinforce_plus_plus", 'single_session="raw"'),
    ],
)
def test_an_option_of_another_choice_has_no_effect_and_is_reported(override, option):
    found = compile_config(None, [], [override, f"algorithm.{option}"])
    key = f"algorithm.{option.partition('=')[0]}"
    assert [(each.code, each.key) for each in found.diagnostics if each.code == "E303"] == [("E303", key)]


def test_token_baselines_need_the_trainers_own_log_probabilities():
    overrides = ["algorithm.advantage=optimal_token_baseline", "algorithm.old_logprobs=rollout"]
    assert "E310" in {each.code for each in compile_config(None, [], overrides).diagnostics}
