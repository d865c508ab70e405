"""From the config to the spec of each process: plain values, and for each process only its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from tqppo import plugins
from tqppo.algorithms.advantages import EstimateOptions
from tqppo.algorithms.losses import PolicyOptions
from tqppo.config import facts
from tqppo.config.placement import ranks_per_copy
from tqppo.config.sections import Config, OptimizerSection, Section
from tqppo.engines.capabilities import capabilities_of
from tqppo.protocols import EngineSpec, Sampling
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.teachers.pool import Routing, TeacherSetup
from tqppo.rollout.teachers.worker import TeacherSpec
from tqppo.rollout.worker import RolloutSpec
from tqppo.tiny.prepare import TinyModelSpec
from tqppo.tiny.teachers import TeacherRecipe
from tqppo.units import GIB
from tqppo.workers.estimator import EstimatorSpec
from tqppo.workers.specs import (
    DistillSpec,
    ModelSpec,
    OptimizerSpec,
    PolicyLossSpec,
    RoleSpec,
    TeacherHead,
    ValueLossSpec,
)
from tqppo.workers.warm_start import WarmStartSpec

# How far the mean log-probability of a teacher may differ between two scorings of the same tokens.
TEACHER_TOLERANCE = 1e-3  # in float32
ROUGH_TEACHER_TOLERANCE = 0.05  # in smaller types, and of servers elsewhere

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Folders that the config does not know: where this run's models, logs and published weights are."""

    model: str
    tokenizer: str
    logs: Path
    publish: str
    teachers: Mapping[str, str] = field(default_factory=dict)  # the model of each teacher
    scores: Path = Path("teachers")  # where teachers keep what they have computed


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
        lr=facts.warm_start_lr(config),
        seed=config.run.seed,
    )


def warm_start_spec(config: Config, *, device: str) -> WarmStartSpec:
    """Supervised steps of a model that was not made here."""
    warm = config.warm_start
    return WarmStartSpec(
        model=model_spec(config, config.model.path, lora=True, checkpointing=config.actor.gradient_checkpointing),
        tokenizer=config.model.tokenizer or config.model.path,
        steps=warm.steps,
        batch_size=warm.batch_size,
        lr=facts.warm_start_lr(config),
        seed=config.run.seed,
        micro_batch_tokens=config.actor.micro_batch_tokens,
        is_chat=config.data.chat_template,
        device=device,
    )


def teacher_recipe(config: Config) -> TeacherRecipe:
    """A teacher that is made for a task has the student's shape."""
    model = config.model
    return TeacherRecipe(
        family=model.family,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        tie_embeddings=model.tie_embeddings,
    )


def options_of(kind: type[Options], section: Section) -> Options:
    """An algorithm's options, each from the setting of the same name."""
    return kind(**{each.name: getattr(section, each.name) for each in fields(kind)})


def rollout_spec(config: Config, paths: RunPaths, eos_token_ids: tuple[int, ...]) -> RolloutSpec:
    rollout, model = config.rollout, config.model
    engine = EngineSpec(
        model=paths.model,
        max_context_tokens=facts.context_tokens(config),
        max_running=facts.running_rows(config),
        prefix_cache_bytes=facts.prefix_cache_bytes(config),
        dtype=model.dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        eos_token_ids=eos_token_ids,
        deterministic=config.run.deterministic,
        threads=facts.engine_threads(config),
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
        session_retries=rollout.session_retries,
        max_sessions=rollout.max_sessions,
        trust_remote_code=model.trust_remote_code,
        weight_sync=rollout.weight_sync,
        chat_template=config.data.chat_template,
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


def _role(config: Config, role: str, model: ModelSpec, **more: Any) -> RoleSpec:
    section = facts.section_of(config, role)
    return RoleSpec(
        model=model,
        ranks_per_copy=ranks_per_copy(config, role),
        features=facts.features(config),
        temperature=config.rollout.temperature,
        micro_batch_tokens=section.micro_batch_tokens,
        context_parallel=section.context_parallel,
        threads=facts.worker_threads(config),
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


def actor_spec(config: Config, paths: RunPaths, special_ids: tuple[int, ...] = ()) -> RoleSpec:
    """The actor; with teachers, the student. `special_ids` are tokens that distillation leaves out."""
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
        "actor",
        model,
        optimizer=_optimizer(actor, actor.lr, config.run.max_steps),
        policy_loss=loss,
        distill=distill_spec(config, paths, special_ids) if facts.has_teachers(config) else None,
        with_checksums=facts.verifies_weights(config),
        num_versions=facts.published_versions(config),
        publish_dir=paths.publish,
    )


def distill_spec(config: Config, paths: RunPaths, special_ids: tuple[int, ...]) -> DistillSpec:
    section = config.distillation
    return DistillSpec(
        loss=section.loss,
        update=section.update,
        coef=section.coef,
        loss_max=section.loss_max,
        logprob_min=section.logprob_min,
        options=options_of(PolicyOptions, config.algorithm),
        special_ids=special_ids if section.mask_special else (),
        teachers=tuple(TeacherHead(name, paths.teachers[name]) for name in config.teachers),
    )


# -- teachers ----------------------------------------------------------------------------------------------------------


def teacher_setups(config: Config, paths: RunPaths, *, vocabulary: int) -> list[TeacherSetup]:
    """The teachers in the config's order; none in modes without."""
    names = config.teachers if facts.has_teachers(config) else ()
    return [_teacher_setup(config, paths, name, vocabulary) for name in names]


def _teacher_setup(config: Config, paths: RunPaths, name: str, vocabulary: int) -> TeacherSetup:
    """One teacher: its replicas get the values of its own section, and nothing else."""
    teacher, distillation, features = config.teachers[name], config.distillation, facts.features(config)
    able = capabilities_of(teacher.backend)
    is_exact = facts.compute_dtype(config) == "float32" and not teacher.endpoints
    return TeacherSetup(
        spec=TeacherSpec(
            name=name,
            backend=teacher.backend,
            engine=teacher_engine(config, paths, name),
            top_k=features.teacher_top_k,
            hidden=features.teacher_hidden,
            hidden_dtype=facts.compute_dtype(config),
            vocabulary=vocabulary,
            cache_path=str((paths.scores / f"{name}.sqlite").resolve()),
            cache_bytes=int(distillation.cache_gb * GIB),
        ),
        replicas=teacher.replicas,
        endpoints=tuple(teacher.endpoints),
        match=tuple(teacher.match),
        prompt=teacher.prompt,
        is_deterministic=config.run.deterministic and able is not None and able.deterministic,
        timeout_s=distillation.timeout_s,
        retries=distillation.retries,
        tolerance=TEACHER_TOLERANCE if is_exact else ROUGH_TEACHER_TOLERANCE,
    )


def teacher_engine(config: Config, paths: RunPaths, name: str) -> EngineSpec:
    teacher, model = config.teachers[name], config.model
    return EngineSpec(
        model=paths.teachers[name],
        max_context_tokens=facts.teacher_context_tokens(config, name),
        max_running=facts.teacher_rows(config),
        dtype=model.dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        deterministic=config.run.deterministic,
        threads=config.run.threads or 1,
        seed=config.run.seed,
        log_dir=str(paths.logs.resolve()),
        python=teacher.python,
        tensor_parallel=teacher.tensor_parallel,
        memory_fraction=teacher.memory_fraction,
        start_timeout_s=teacher.start_timeout_s,
        request_timeout_s=config.distillation.timeout_s,
        max_restarts=teacher.max_restarts,
        engine_args=dict(teacher.engine_args),
        scores_hidden=facts.features(config).teacher_hidden,
    )


def teacher_routing(config: Config) -> Routing:
    section = config.distillation
    return Routing(
        column="" if section.route_by == config.data.source_key else section.route_by,
        batch_rows=section.batch_rows,
        drops_groups=section.on_teacher_failure == "drop",
    )


def critic_spec(config: Config, paths: RunPaths) -> RoleSpec:
    critic = config.critic
    model = model_spec(config, critic.path or paths.model, checkpointing=critic.gradient_checkpointing)
    loss = ValueLossSpec(clip=critic.value_clip, aggregate=config.algorithm.aggregate, horizon=facts.horizon(config))
    optimizer = _optimizer(critic, critic.lr, config.run.max_steps)
    return _role(config, "critic", model, optimizer=optimizer, value_loss=loss)


def reference_spec(config: Config, paths: RunPaths) -> RoleSpec:
    path = config.reference.path or paths.model
    return _role(config, "reference", model_spec(config, path))


def reward_model_spec(config: Config) -> RoleSpec:
    return _role(config, "reward_model", model_spec(config, config.reward_model.path))


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
