"""The settings of a worker: plain values, only its own, small enough to send to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqppo.algorithms.losses import PolicyOptions
from tqppo.dataflow import Features


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model, and in what form it runs."""

    path: str  # a Hugging Face folder or hub name
    dtype: str = "auto"  # of the computation; parameters that learn are kept in float32
    attention: str = "auto"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW and its learning rate, which is a pure function of the training step."""

    lr: float = 1e-6
    total_steps: int = 1
    schedule: str = "constant"  # or linear, cosine
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    grad_clip: float = 1.0  # 0: off
    epochs: int = 1  # passes over the batch per training step


@dataclass(frozen=True, slots=True)
class PolicyLossSpec:
    """The actor's loss: the policy term by name, plus KL to the reference and an entropy bonus."""

    name: str = "ppo"
    options: PolicyOptions = field(default_factory=PolicyOptions)
    aggregate: str = "token-mean"
    horizon: int = 1
    kl: str = "k3"  # estimator of the KL term, with `Features.kl_in_loss`
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class ValueLossSpec:
    """The critic's loss: clipped squared error to the returns."""

    clip: float = 0.5  # 0: off
    aggregate: str = "token-mean"
    horizon: int = 1


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """A teacher's name, and the folder or hub name whose output head gives its distribution from hidden states."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class DistillSpec:
    """The distillation term of the actor's loss."""

    loss: str = "k3"
    update: str = "supervised"  # or policy_gradient
    coef: float = 1.0  # in addition to a policy loss; without one the term counts whole
    loss_max: float = 0.0  # clamp per token; 0: off
    logprob_min: float = 0.0  # lower clamp of log-probabilities; 0: off
    options: PolicyOptions = field(default_factory=PolicyOptions)  # clipping, with policy_gradient
    special_ids: tuple[int, ...] = ()  # sampled tokens that do not count
    teachers: tuple[TeacherHead, ...] = ()  # in the order of `teacher_index`


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Everything one role's ranks need. Roles that do not learn ignore the optimizer and the losses."""

    model: ModelSpec
    features: Features = field(default_factory=Features)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    policy_loss: PolicyLossSpec = field(default_factory=PolicyLossSpec)
    value_loss: ValueLossSpec = field(default_factory=ValueLossSpec)
    distill: DistillSpec | None = None  # of an actor with teachers
    temperature: float = 1.0  # of the sampled distribution, whose log-probabilities are trained
    micro_batch_tokens: int = 16_384  # on one rank
    context_parallel: int = 1  # ranks that compute a row together
    ranks_per_copy: int = 0  # neighbours that share a copy of the model's state; 0: all ranks share one
    threads: int = 0  # 0: one on CPUs, torch's own choice with a GPU
    seed: int = 0
    deterministic: bool = True
    timeout_s: float = 3600.0  # of each call, and of each collective of the ranks
    with_checksums: bool = False  # whether published weights have them
    num_versions: int = 2  # published weights that are kept: those which engines use or will load, and the newest
    publish_dir: str = ""  # where `publish` puts folders of weights; empty: /dev/shm
