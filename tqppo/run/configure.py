"""From the config to what each part is told: plain values, and for each part only its own. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqppo.config.sections import Config, OptimizerSection
from tqppo.protocols import EngineSpec, Sampling
from tqppo.rewards.scorer import ScorerSpec
from tqppo.workers.specs import ModelSpec, OptimizerSpec, PolicyLossSpec, RoleSpec, ValueLossSpec

if TYPE_CHECKING:
    from tqppo.rollout.worker import RolloutSpec
    from tqppo.workers.estimator import EstimatorSpec


@dataclass(frozen=True, slots=True)
class Places:
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


def context_tokens(config: Config) -> int:
    return config.rollout.max_context_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def rollout_spec(config: Config, places: Places, eos_token_ids: tuple[int, ...]) -> RolloutSpec:
    from tqppo.rollout.worker import RolloutSpec

    rollout, model = config.rollout, config.model
    engine = EngineSpec(
        model=places.model,
        max_context_tokens=context_tokens(config),
        max_running=rollout.max_running,
        dtype=model.dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        eos_token_ids=eos_token_ids,
        deterministic=config.run.deterministic,
        threads=config.run.threads or 1,
        seed=config.run.seed,
        log_dir=str(places.logs),
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
        tokenizer=places.tokenizer,
        reward=ScorerSpec.of(config.reward, max_new_tokens=rollout.max_new_tokens),
        agent=rollout.agent,
        agent_args=dict(rollout.agent_args),
        max_trajectories=rollout.max_trajectories,
        trust_remote_code=model.trust_remote_code,
        weight_sync=rollout.weight_sync,
    )


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


def _horizon(config: Config) -> int:
    return config.algorithm.horizon or config.rollout.max_new_tokens


def actor_spec(config: Config, places: Places) -> RoleSpec:
    actor, algorithm = config.actor, config.algorithm
    loss = PolicyLossSpec(
        name=algorithm.loss,
        old_column="old_logprobs" if algorithm.old_logprobs == "recompute" else "rollout_logprobs",
        aggregate=algorithm.aggregate,
        horizon=_horizon(config),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
        sapo_tau_positive=algorithm.sapo_tau_positive,
        sapo_tau_negative=algorithm.sapo_tau_negative,
        kl=algorithm.kl_loss,
        kl_coef=algorithm.kl_loss_coef,
        entropy_coef=algorithm.entropy_coef,
        has_correction=algorithm.correction != "none",
        has_loss_mask=algorithm.reject != "none",
    )
    model = model_spec(config, places.model, lora=True, checkpointing=actor.gradient_checkpointing)
    return _role(
        config,
        model,
        actor.micro_batch_tokens,
        optimizer=_optimizer(actor, actor.lr, config.run.max_steps),
        policy_loss=loss,
        publish_dir=places.publish,
    )


def critic_spec(config: Config, places: Places) -> RoleSpec:
    critic = config.critic
    model = model_spec(config, critic.path or places.model, checkpointing=critic.gradient_checkpointing)
    loss = ValueLossSpec(
        clip=critic.value_clip,
        aggregate=config.algorithm.aggregate,
        horizon=_horizon(config),
        has_loss_mask=config.algorithm.reject != "none",
    )
    optimizer = _optimizer(critic, critic.lr, config.run.max_steps)
    return _role(config, model, critic.micro_batch_tokens, optimizer=optimizer, value_loss=loss)


def reference_spec(config: Config, places: Places) -> RoleSpec:
    path = config.reference.path or places.model
    return _role(config, model_spec(config, path), config.reference.micro_batch_tokens)


def reward_model_spec(config: Config) -> RoleSpec:
    return _role(config, model_spec(config, config.reward_model.path), config.reward_model.micro_batch_tokens)


def estimator_spec(config: Config, places: Places) -> EstimatorSpec:
    from tqppo.algorithms.advantages import EstimateOptions
    from tqppo.workers.estimator import EstimatorSpec

    algorithm = config.algorithm
    return EstimatorSpec(
        advantage=algorithm.advantage,
        options=EstimateOptions(gamma=algorithm.gamma, lam=algorithm.lam, single_session=algorithm.single_session),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_new_tokens,
        old_logprobs="old_logprobs" if algorithm.old_logprobs == "recompute" else "rollout_logprobs",
        kl_reward=algorithm.kl_reward if algorithm.kl_reward_coef > 0 else "none",
        correction=algorithm.correction,
        correction_cap=algorithm.correction_cap,
        correction_floor=algorithm.correction_floor,
        reject=algorithm.reject,
        reject_threshold=algorithm.reject_threshold,
        model_score_weight=config.reward_model.weight,
        session_mean=algorithm.aggregate == "session-mean",
        tokenizer=places.tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )


def role_spec(config: Config, places: Places, role: str) -> RoleSpec:
    if role == "actor":
        return actor_spec(config, places)
    if role == "critic":
        return critic_spec(config, places)
    return reference_spec(config, places) if role == "reference" else reward_model_spec(config)
