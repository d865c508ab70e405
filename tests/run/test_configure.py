"""From the config to the specs of the processes: every setting arrives where it is used."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tqppo.algorithms.losses import PolicyOptions
from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.run import compose, configure
from tqppo.run.configure import RunPaths

PATHS = RunPaths("models/start", "models/tokens", Path("logs"), "/dev/shm/published")


def compiled(preset: str, *sets: str) -> Config:
    config = compile_config(preset, [], sets, {}).config
    assert config is not None
    return config


def test_each_option_of_a_policy_loss_is_the_setting_of_the_same_name() -> None:
    config = compiled("quickstart", "algorithm.clip_low=0.11", "algorithm.clip_high=0.33")
    options = configure.actor_spec(config, PATHS).policy_loss.options
    assert (options.clip_low, options.clip_high) == (0.11, 0.33)
    assert all(getattr(options, each.name) == getattr(config.algorithm, each.name) for each in fields(PolicyOptions))


def test_the_actor_learns_adapters_and_the_reference_has_none() -> None:
    config = compiled("quickstart", "model.lora_rank=4")
    assert configure.actor_spec(config, PATHS).model.lora_rank == 4
    assert configure.reference_spec(config, PATHS).model.lora_rank == 0


def test_critic_and_reference_start_from_their_own_model_or_from_the_actors() -> None:
    plain = compiled("ppo-tiny")
    assert configure.critic_spec(plain, PATHS).model.path == "models/start"
    assert configure.reference_spec(plain, PATHS).model.path == "models/start"
    own = compiled("ppo-tiny", "critic.path=models/critic", "critic.lr=0.5")
    spec = configure.critic_spec(own, PATHS)
    assert (spec.model.path, spec.optimizer.lr) == ("models/critic", 0.5)


def test_the_engine_gets_the_runs_seed_paths_and_context() -> None:
    config = compiled("quickstart", "run.seed=7", "rollout.max_new_tokens=9", "data.max_prompt_tokens=20")
    spec = configure.rollout_spec(config, PATHS, (2,))
    assert (spec.engine.model, spec.tokenizer, spec.engine.log_dir) == ("models/start", "models/tokens", "logs")
    assert (spec.engine.seed, spec.engine.eos_token_ids) == (7, (2,))
    assert spec.engine.max_context_tokens == 29


def test_validation_samples_by_its_own_settings_and_leaves_no_tensors() -> None:
    config = compiled("quickstart", "validation.samples=3", "validation.temperature=0.5", "rollout.temperature=1.0")
    task = compose.validation_task(config)
    assert (task.group_size, task.sampling.temperature, task.greedy, task.keep_tensors) == (3, 0.5, True, False)
    assert compose.training_task(config).sampling.temperature == 1.0
    assert task.partition != compose.training_task(config).partition


def test_the_weight_of_the_kl_moves_only_with_the_adaptive_controller() -> None:
    kl = ("algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.1")
    fixed = compose.kl_controller(compiled("ppo-tiny", *kl))
    assert fixed.after(10.0, 64).coef == 0.1
    adaptive = ("algorithm.kl_controller=adaptive", "algorithm.kl_target=0.01")
    assert compose.kl_controller(compiled("ppo-tiny", *kl, *adaptive)).after(10.0, 64).coef > 0.1
