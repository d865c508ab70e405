"""From the config to the spec of each process: plain values, and for each process only its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from tqppo import plugins
from tqppo.algorithms.advantages import EstimateOptions
from tqppo.algorithms.losses import PolicyOptions
from tqppo.config import facts
from tqppo.config.sections import Config, OptimizerSection, Section
from tqppo.protocols import EngineSpec, Sampling
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.worker import RolloutSpec
from tqppo.tiny.prepare import TinyModelSpec
from tqppo.workers.estimator import EstimatorSpec
from tqppo.workers.specs import ModelSpec, OptimizerSpec, PolicyLossSpec, RoleSpec, ValueLossSpec

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Folders that the config does not know: where this run's model, logs and published weights are."""

    model: str
    tokenizer: str
    logs: Path
    publish: str


def sampling(config: Config, *, temperature: float | None = None) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def tiny_model_spec(config: Config) -> TinyModelSpec:
    """The built-in model, for `model.path = "tiny"`."""
    model, warm = config.model, config.warm_start
    return TinyModelSpec(
        family=model.family,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        tie_embeddings=model.tie_embeddings,
        steps=warm.steps,
        batch_size=warm.batch_size,
        lr=warm.lr,
        seed=config.run.seed,
    )


def options_of(kind: type[Options], section: Section) -> Options:
    """An algorithm's options, each from the setting of the same name."""
    return kind(**{field.name: getattr(section, field.name) for field in fields(kind)})


def rollout_spec(config: Config, paths: RunPaths, eos_token_ids: tuple[int, ...]) -> RolloutSpec:
    rollout, model = config.rollout, config.model
    engine = EngineSpec(
        model=paths.model,
        max_context_tokens=facts.context_tokens(config),
        max_running=rollout.max_running,
        dtype=model.dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        eos_token_ids=eos_token_ids,
        deterministic=config.run.deterministic,
        threads=config.run.threads or 1,
        seed=config.run.seed,
        log_dir=str(paths.logs),
        python=rollout.python,
        host=rollout.host,
        tensor_parallel=rollout.tensor_parallel,
        memory_fraction=rollout.memory_fraction,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        max_restarts=rollout.max_restarts,
        engine_args=dict(rollout.engine_args),
    )
    return RolloutSpec(
        backend=rollout.backend,
        engine=engine,
        tokenizer=paths.tokenizer,
        reward=ScorerSpec.of(config.reward, max_new_tokens=rollout.max_new_tokens),
        agent=plugins.absolute(rollout.agent),
        agent_args={name: with_full_paths(value) for name, value in rollout.agent_args.items()},
        max_trajectories=rollout.max_trajectories,
        trust_remote_code=model.trust_remote_code,
        weight_sync=rollout.weight_sync,
    )


def with_full_paths(value: object) -> object:
    """An argument of an agent loop; each `file.py:name` in it has the file's full path, for workers elsewhere."""
    if isinstance(value, list):
        return [with_full_paths(each) for each in value]
    return plugins.absolute(value) if isinstance(value, str) else value


def model_spec(config: Config, path: str, *, lora: bool = False, checkpointing: bool = False) -> ModelSpec:
    model = config.model
    return ModelSpec(
        path=path,
        dtype=model.dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=checkpointing,
        lora_rank=model.lora_rank if lora else 0,
        lora_alpha=model.lora_alpha,
        lora_targets=tuple(model.lora_targets),
    )


def _role(config: Config, model: ModelSpec, micro_batch_tokens: int, **more: Any) -> RoleSpec:
    return RoleSpec(
        model=model,
        features=facts.features(config),
        temperature=config.rollout.temperature,
        micro_batch_tokens=micro_batch_tokens,
        threads=config.run.threads,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        **more,
    )


def _optimizer(section: OptimizerSection, lr: float, total_steps: int) -> OptimizerSpec:
    return OptimizerSpec(
        lr=lr,
        total_steps=total_steps,
        schedule=section.schedule,
        warmup_steps=section.warmup_steps,
        min_lr_ratio=section.min_lr_ratio,
        weight_decay=section.weight_decay,
        beta1=section.beta1,
        beta2=section.beta2,
        grad_clip=section.grad_clip,
        epochs=section.epochs,
    )


def actor_spec(config: Config, paths: RunPaths) -> RoleSpec:
    actor, algorithm = config.actor, config.algorithm
    loss = PolicyLossSpec(
        name=algorithm.loss,
        options=options_of(PolicyOptions, algorithm),
        aggregate=algorithm.aggregate,
        horizon=facts.horizon(config),
        kl=algorithm.kl_loss,
        kl_coef=algorithm.kl_loss_coef,
        entropy_coef=algorithm.entropy_coef,
    )
    model = model_spec(config, paths.model, lora=True, checkpointing=actor.gradient_checkpointing)
    return _role(
        config,
        model,
        actor.micro_batch_tokens,
        optimizer=_optimizer(actor, actor.lr, config.run.max_steps),
        policy_loss=loss,
        publish_dir=paths.publish,
    )


def critic_spec(config: Config, paths: RunPaths) -> RoleSpec:
    critic = config.critic
    model = model_spec(config, critic.path or paths.model, checkpointing=critic.gradient_checkpointing)
    loss = ValueLossSpec(clip=critic.value_clip, aggregate=config.algorithm.aggregate, horizon=facts.horizon(config))
    optimizer = _optimizer(critic, critic.lr, config.run.max_steps)
    return _role(config, model, critic.micro_batch_tokens, optimizer=optimizer, value_loss=loss)


def reference_spec(config: Config, paths: RunPaths) -> RoleSpec:
    path = config.reference.path or paths.model
    return _role(config, model_spec(config, path), config.reference.micro_batch_tokens)


def reward_model_spec(config: Config) -> RoleSpec:
    return _role(config, model_spec(config, config.reward_model.path), config.reward_model.micro_batch_tokens)


def estimator_spec(config: Config, paths: RunPaths) -> EstimatorSpec:
    algorithm = config.algorithm
    return EstimatorSpec(
        advantage=algorithm.advantage,
        options=options_of(EstimateOptions, algorithm),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_new_tokens,
        features=facts.features(config),
        kl_reward=algorithm.kl_reward,
        correction=algorithm.correction,
        correction_cap=algorithm.correction_cap,
        correction_floor=algorithm.correction_floor,
        reject=algorithm.reject,
        reject_threshold=algorithm.reject_threshold,
        model_score_weight=config.reward_model.weight,
        tokenizer=paths.tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )
