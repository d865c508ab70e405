"""Which stage of a step reads and writes which columns, and which stages make up a mode's step. Imports no torch.

Each fact is written here once. The plan and the config's checks read it, the bridge fetches and checks columns by it,
and a test compares it with the comments in `trainers/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tqppo import plugins


@dataclass(frozen=True, slots=True)
class Features:
    """The settings of a run that decide which stages it has and which columns they use.

    `config.facts.features` derives them from the config; every worker gets a copy in its spec.
    """

    has_policy_loss: bool = True  # False when distillation runs without the task's reward
    has_critic: bool = False
    uses_values: bool = False  # the advantage estimator is GAE
    has_reward_model: bool = False
    recomputes_old_logprobs: bool = True  # False: the engine's log-probabilities stand for the old policy
    takes_one_step: bool = False  # the actor takes one optimizer step per batch
    kl_in_reward: bool = False
    kl_in_loss: bool = False
    has_correction_weights: bool = False
    has_loss_mask: bool = False
    has_session_weights: bool = False
    has_greedy_baseline: bool = False  # ReMax samples one greedy session per prompt
    has_token_baseline: bool = False  # the optimal token baselines weigh tokens by Σ p² of the old policy
    credits_turns: bool = False  # rows say where their turns end, what each earned and in which state it began
    filters_groups: bool = False
    has_teachers: bool = False
    teacher_top_k: int = 0  # tokens of the teacher's distribution per position; 0: the sampled token only
    teacher_hidden: bool = False  # the whole distribution instead, by the teacher's last hidden states
    distills_by_policy_gradient: bool = False

    @property
    def needs_reference(self) -> bool:
        return self.kl_in_reward or self.kl_in_loss

    @property
    def needs_old_policy(self) -> bool:
        """Whether any loss compares the policy with the one that sampled."""
        return self.has_policy_loss or self.distills_by_policy_gradient

    @property
    def old_is_current(self) -> bool:
        """Whether the update's own forward gives the old policy's log-probabilities: nothing changed the policy since
        it sampled, and no stage before the update reads them."""
        asked = self.has_correction_weights or self.has_loss_mask or self.kl_in_reward or self.has_token_baseline
        return self.recomputes_old_logprobs and self.takes_one_step and not self.has_teachers and not asked

    @property
    def compares_engine(self) -> bool:
        """Whether the trainer's log-probabilities of the sampled tokens exist in addition to the engine's."""
        return self.recomputes_old_logprobs and self.needs_old_policy and not self.old_is_current

    @property
    def old_logprobs(self) -> str:
        """The column that holds the old policy's log-probabilities."""
        return "old_logprobs" if self.recomputes_old_logprobs else "rollout_logprobs"


Condition = Callable[[Features], bool]
Flow = Mapping[str, Condition]  # column → when it is read or written


def _always(_: Features) -> bool:
    return True


def _columns(*names: str, **conditional: Condition) -> Flow:
    return {**dict.fromkeys(names, _always), **conditional}


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of a step. `name` is how the step calls it: `actor.update` is `self.actor.update(…)`."""

    name: str
    reads_when: Flow = field(default_factory=dict)
    writes_when: Flow = field(default_factory=dict)
    runs_when: Condition = _always

    def runs(self, features: Features) -> bool:
        return self.runs_when(features)

    def reads(self, features: Features) -> tuple[str, ...]:
        return tuple(name for name, applies in self.reads_when.items() if applies(features))

    def writes(self, features: Features) -> tuple[str, ...]:
        return tuple(name for name, applies in self.writes_when.items() if applies(features))


_TEACHER_COLUMNS: Flow = {
    "teacher_ids": lambda f: f.has_teachers and f.teacher_top_k > 0,
    "teacher_logprobs": lambda f: f.has_teachers and not f.teacher_hidden,
    "teacher_hidden": lambda f: f.has_teachers and f.teacher_hidden,
    "teacher_index": lambda f: f.has_teachers,
}
GENERATE = Stage(
    "rollout.generate",
    # Groups are chosen while the batch is collected, so a filter can only use scores that exist by then.
    reads_when={"model_score": lambda f: f.filters_groups and f.has_reward_model},
    writes_when=_columns(
        "tokens",
        "response_mask",
        "rollout_logprobs",
        "reward",
        baseline_reward=lambda f: f.has_greedy_baseline,
        turn_ends=lambda f: f.credits_turns,
        turn_rewards=lambda f: f.credits_turns,
        turn_anchors=lambda f: f.credits_turns,
        **_TEACHER_COLUMNS,
    ),
)
SCORE = Stage(
    "reward_model.score",
    reads_when=_columns("tokens", "response_mask"),
    writes_when=_columns("model_score"),
    runs_when=lambda f: f.has_reward_model,
)
OLD_LOGPROBS = Stage(
    "actor.old_logprobs",
    reads_when=_columns("tokens", "response_mask"),
    writes_when=_columns("old_logprobs", sum_pi_squared=lambda f: f.has_token_baseline),
    runs_when=lambda f: f.compares_engine,
)
REFERENCE_LOGPROBS = Stage(
    "reference.logprobs",
    reads_when=_columns("tokens", "response_mask"),
    writes_when=_columns("ref_logprobs"),
    runs_when=lambda f: f.needs_reference,
)
VALUES = Stage(
    "critic.values",
    reads_when=_columns("tokens", "response_mask"),
    writes_when=_columns("values"),
)
ESTIMATE = Stage(
    "advantages.estimate",
    reads_when=_columns(
        "response_mask",
        reward=lambda f: f.has_policy_loss,
        model_score=lambda f: f.has_policy_loss and f.has_reward_model,
        # With both sides at hand their difference is reported, and corrected where the config asks for it.
        rollout_logprobs=lambda f: f.compares_engine or f.kl_in_reward,
        old_logprobs=lambda f: f.compares_engine,
        ref_logprobs=lambda f: f.kl_in_reward,
        values=lambda f: f.uses_values,
        baseline_reward=lambda f: f.has_greedy_baseline,
        sum_pi_squared=lambda f: f.has_token_baseline,
        turn_ends=lambda f: f.credits_turns,
        turn_rewards=lambda f: f.credits_turns,
        turn_anchors=lambda f: f.credits_turns,
    ),
    writes_when=_columns(
        advantages=lambda f: f.has_policy_loss,
        returns=lambda f: f.uses_values,
        loss_mask=lambda f: f.has_loss_mask,
        correction_weights=lambda f: f.has_correction_weights,
        session_weight=lambda f: f.has_session_weights,
    ),
    # Distillation without the task's reward needs no advantages, and may still need masks and weights.
    runs_when=lambda f: f.has_policy_loss or f.has_correction_weights or f.has_loss_mask or f.has_session_weights,
)
CRITIC_UPDATE = Stage(
    "critic.update",
    reads_when=_columns(
        "tokens",
        "response_mask",
        "values",
        "returns",
        loss_mask=lambda f: f.has_loss_mask,
        session_weight=lambda f: f.has_session_weights,
    ),
)
ACTOR_UPDATE = Stage(
    "actor.update",
    reads_when=_columns(
        "tokens",
        "response_mask",
        old_logprobs=lambda f: f.compares_engine,
        # The engine's stand for the old policy's, or are compared with those of the update's own forward.
        rollout_logprobs=lambda f: f.needs_old_policy and not f.compares_engine,
        advantages=lambda f: f.has_policy_loss,
        ref_logprobs=lambda f: f.has_policy_loss and f.kl_in_loss,
        correction_weights=lambda f: f.has_correction_weights,
        loss_mask=lambda f: f.has_loss_mask,
        session_weight=lambda f: f.has_session_weights,
        **_TEACHER_COLUMNS,
    ),
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train: the stages of its step in order, and the class whose `step` calls them.

    A mode of another package is a `Mode` in a module without heavy imports, registered under the entry-point group
    `tqppo.mode`.
    """

    name: str
    summary: str
    trainer: str  # `module:Class`, imported when a run is built
    stages: tuple[Stage, ...]
    advantage: str = "grpo"  # the estimator unless the config names one
    has_teachers: bool = False

    @property
    def has_critic(self) -> bool:
        return any(stage.name.startswith("critic.") for stage in self.stages)


_BEFORE_ADVANTAGES = (GENERATE, SCORE, OLD_LOGPROBS, REFERENCE_LOGPROBS)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            "ppo",
            "critic, GAE",
            "tqppo.trainers.ppo:PpoTrainer",
            (*_BEFORE_ADVANTAGES, VALUES, ESTIMATE, CRITIC_UPDATE, ACTOR_UPDATE),
            advantage="gae",
        ),
        Mode(
            "grpo",
            "groups of sessions",
            "tqppo.trainers.grpo:GrpoTrainer",
            (*_BEFORE_ADVANTAGES, ESTIMATE, ACTOR_UPDATE),
        ),
        Mode(
            "distill",
            "on-policy distillation",
            "tqppo.trainers.distill:DistillTrainer",
            (*_BEFORE_ADVANTAGES, ESTIMATE, ACTOR_UPDATE),
            has_teachers=True,
        ),
    )
}


def mode_names() -> list[str]:
    """The built-in modes, then those of installed packages."""
    return [*MODES, *(name for name in plugins.names("mode") if name not in MODES)]


def modes_described() -> str:
    """The documentation of the setting `mode`."""
    return f"What to train with: {', '.join(f'{mode.name} ({mode.summary})' for mode in MODES.values())}."


def mode_named(name: str) -> Mode:
    """A built-in or installed mode; an unknown name is a `BackendError` that lists the known ones."""
    if name in MODES:
        return MODES[name]
    mode = plugins.load("mode", name)
    assert isinstance(mode, Mode), f"the entry point tqppo.mode {name} must be a tqppo.dataflow.Mode, found {mode!r}"
    return mode


def stages_of(mode: Mode, features: Features) -> list[Stage]:
    """The stages that a step of this run has, in order."""
    return [stage for stage in mode.stages if stage.runs(features)]
