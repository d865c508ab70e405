"""Settings that would have no effect are errors: the user who sets one expects it to do something.

They are only warnings where a later layer turned off what the setting belongs to, as `--set mode=grpo` does after a
preset for ppo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tqppo.builtin import is_procedural
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import (
    data_sources,
    features,
    has_critic,
    has_policy_loss,
    has_teachers,
    is_agent,
    keeps_prefixes,
    needs_reference,
    routes_rows,
    uses_top_k,
)
from tqppo.config.schema import settings
from tqppo.config.sections import ADVANTAGE_OPTIONS, LOSS_OPTIONS, Config


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys (`section.*` for all of a section) that have an effect only when `when` holds.

    `causes` are the keys that `when` reads, `because` says why there is no effect, `fix` how to get one.
    """

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    because: str
    causes: tuple[str, ...]
    fix: str


_TINY = tuple(f"model.{name}" for name in ("family", "hidden_size", "num_layers", "num_heads", "tie_embeddings"))


def _option_rules() -> Iterator[Rule]:
    """One rule per option of a loss or an advantage estimator: it has an effect only with those that use it."""
    for option, users in _users(LOSS_OPTIONS).items():
        yield Rule(
            (f"algorithm.{option}",),
            partial(_uses_loss_option, users),
            f"the policy loss is not one of those that use it ({', '.join(users)})",
            ("algorithm.loss", "mode", "distillation.update", "distillation.task_reward"),
            f'set algorithm.loss = "{users[0]}"',
        )
    for option, users in _users(ADVANTAGE_OPTIONS).items():
        yield Rule(
            (f"algorithm.{option}",),
            partial(_uses_advantage_option, users),
            f"algorithm.advantage is not one of those that use it ({', '.join(users)})",
            ("algorithm.advantage", "mode"),
            'set mode = "ppo"' if users == ["gae"] else f'set algorithm.advantage = "{users[0]}"',
        )


def _uses_loss_option(users: Sequence[str], config: Config) -> bool:
    """Distillation by policy gradient clips as the loss ppo does, whatever the config's loss."""
    by_policy_gradient = features(config).distills_by_policy_gradient
    return (has_policy_loss(config) and config.algorithm.loss in users) or (by_policy_gradient and "ppo" in users)


def _uses_advantage_option(users: Sequence[str], config: Config) -> bool:
    return config.algorithm.advantage in users


def _users(options: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Option → the losses or estimators that use it."""
    names = dict.fromkeys(option for used in options.values() for option in used)
    return {option: [name for name, used in options.items() if option in used] for option in names}


RULES: tuple[Rule, ...] = (
    *_option_rules(),
    Rule(
        ("critic.*",),
        has_critic,
        "the mode has no critic",
        ("mode",),
        'set mode = "ppo"',
    ),
    Rule(
        ("distillation.*", "teachers.*"),
        has_teachers,
        "the mode has no teachers",
        ("mode",),
        'set mode = "distill"',
    ),
    Rule(
        ("reference.*",),
        needs_reference,
        "a reference is used only for KL, and neither kl_reward nor kl_loss has a weight",
        (
            "algorithm.kl_loss",
            "algorithm.kl_loss_coef",
            "algorithm.kl_reward",
            "algorithm.kl_reward_coef",
            "mode",
            "distillation.task_reward",
        ),
        'set algorithm.kl_loss = "k3" and algorithm.kl_loss_coef',
    ),
    Rule(
        ("algorithm.kl_reward_coef", "algorithm.kl_controller"),
        lambda c: c.algorithm.kl_reward != "none",
        "kl_reward is off",
        ("algorithm.kl_reward",),
        'set algorithm.kl_reward = "k1"',
    ),
    Rule(
        ("algorithm.kl_target", "algorithm.kl_horizon"),
        lambda c: c.algorithm.kl_controller == "adaptive",
        "the KL controller is fixed",
        ("algorithm.kl_controller",),
        'set algorithm.kl_controller = "adaptive"',
    ),
    Rule(
        ("algorithm.kl_loss_coef",),
        lambda c: c.algorithm.kl_loss != "none",
        "kl_loss is off",
        ("algorithm.kl_loss",),
        'set algorithm.kl_loss = "k3"',
    ),
    Rule(
        ("algorithm.correction_cap",),
        lambda c: c.algorithm.correction != "none",
        "correction is off",
        ("algorithm.correction",),
        'set algorithm.correction = "token"',
    ),
    Rule(
        ("algorithm.correction_floor",),
        lambda c: c.algorithm.correction == "icepop",
        "only icepop has a floor",
        ("algorithm.correction",),
        'set algorithm.correction = "icepop"',
    ),
    Rule(
        ("algorithm.reject_threshold",),
        lambda c: c.algorithm.reject != "none",
        "reject is off",
        ("algorithm.reject",),
        'set algorithm.reject = "token"',
    ),
    Rule(
        ("algorithm.credit",),
        is_agent,
        "the agent single_turn yields one trajectory of one turn",
        ("rollout.agent",),
        'set rollout.agent = "rewrite"',
    ),
    Rule(
        ("algorithm.turn_gamma",),
        lambda c: features(c).credits_turns,
        "only gigpo and credit for turns look at later turns",
        ("algorithm.credit", "algorithm.advantage"),
        'set algorithm.credit = "turn"',
    ),
    Rule(
        ("algorithm.horizon",),
        lambda c: c.algorithm.aggregate == "seq-mean-token-sum-norm",
        "only seq-mean-token-sum-norm divides by a constant",
        ("algorithm.aggregate",),
        'set algorithm.aggregate = "seq-mean-token-sum-norm"',
    ),
    Rule(
        ("algorithm.filter_max_rounds", "rollout.on_short_batch"),
        lambda c: c.algorithm.filter_groups or c.rollout.on_incomplete_group == "refill",
        'filter_groups is off, and on_incomplete_group is not "refill"',
        ("algorithm.filter_groups", "rollout.on_incomplete_group"),
        'set algorithm.filter_groups = true, or rollout.on_incomplete_group = "refill"',
    ),
    Rule(
        ("algorithm.advantage", "algorithm.loss", "algorithm.kl_reward", "algorithm.kl_loss", "algorithm.entropy_coef"),
        has_policy_loss,
        "distillation without the task's reward has no policy term",
        ("mode", "distillation.task_reward"),
        "set distillation.task_reward = true",
    ),
    Rule(
        ("distillation.coef",),
        has_policy_loss,
        "without the task's reward the distillation loss is the only one",
        ("distillation.task_reward", "mode"),
        "set distillation.task_reward = true",
    ),
    Rule(
        ("distillation.route_by",),
        lambda c: not has_teachers(c) or routes_rows(c),
        "there is one teacher, and it scores every row",
        ("mode",),
        "add a teacher, or set teachers.NAME.match",
    ),
    Rule(
        ("distillation.top_k",),
        lambda c: not has_teachers(c) or uses_top_k(c),
        "only the top-k losses use it",
        ("distillation.loss", "mode"),
        'set distillation.loss = "forward_kl_topk"',
    ),
    Rule(
        _TINY,
        lambda c: c.model.path == "tiny",
        "it configures the tiny model, and model.path names another one",
        ("model.path",),
        'set model.path = "tiny"',
    ),
    Rule(
        ("warm_start.steps", "warm_start.batch_size", "warm_start.lr"),
        lambda c: c.model.path == "tiny" or bool(c.warm_start.data),
        "a model other than the tiny one needs demonstrations, and warm_start.data names none",
        ("model.path", "warm_start.data"),
        'set warm_start.data = "demonstrations.jsonl"',
    ),
    Rule(
        ("warm_start.data", "warm_start.batch_size", "warm_start.lr"),
        lambda c: c.warm_start.steps > 0,
        "warm_start.steps is 0",
        ("warm_start.steps",),
        "set warm_start.steps = 25",
    ),
    Rule(
        ("model.lora_alpha", "model.lora_targets"),
        lambda c: c.model.lora_rank > 0,
        "lora_rank is 0: all weights are trained",
        ("model.lora_rank",),
        "set model.lora_rank = 16",
    ),
    Rule(
        ("reward.overlong_factor",),
        lambda c: c.reward.overlong_buffer > 0,
        "overlong_buffer is 0",
        ("reward.overlong_buffer",),
        "set reward.overlong_buffer",
    ),
    Rule(
        ("reward_model.*",),
        lambda c: bool(c.reward_model.path),
        "there is no reward model: reward_model.path is empty",
        ("reward_model.path",),
        "set reward_model.path",
    ),
    Rule(
        ("data.task_args", "data.size"),
        lambda c: any(is_procedural(each) for each in data_sources(c)),
        "only procedural tasks have arguments and a size, and data.train names no task",
        ("data.train",),
        'set data.train = "task:sort"',
    ),
    Rule(
        ("rollout.agent_args",),
        is_agent,
        "the agent single_turn takes no arguments",
        ("rollout.agent",),
        "set rollout.agent",
    ),
    Rule(
        ("rollout.prefix_cache_gb",),
        keeps_prefixes,
        "only the embedded engine has it, for agents with several turns; vllm and sglang have a cache of their own",
        ("rollout.agent", "rollout.backend"),
        "leave it out",
    ),
    Rule(
        ("rollout.max_trajectories",),
        is_agent,
        "the agent single_turn yields one trajectory per session",
        ("rollout.agent",),
        'set rollout.agent = "rewrite"',
    ),
    Rule(
        ("logging.project",),
        lambda c: "wandb" in c.logging.trackers,
        "only wandb has projects",
        ("logging.trackers",),
        'set logging.trackers = ["wandb"]',
    ),
    Rule(
        ("cluster.shard_within_nodes",),
        lambda c: c.cluster.nodes > 1,
        "one node holds one copy in any case",
        ("cluster.nodes",),
        "set cluster.nodes",
    ),
    Rule(
        ("checkpoint.background",),
        lambda c: bool(c.checkpoint.interval),
        "checkpoint.interval is 0, and the checkpoint at the end is waited for",
        ("checkpoint.interval",),
        "set checkpoint.interval",
    ),
    Rule(
        ("actor.min_lr_ratio",),
        lambda c: c.actor.schedule != "constant",
        "a constant learning rate does not decay",
        ("actor.schedule",),
        'set actor.schedule = "cosine"',
    ),
    Rule(
        ("critic.min_lr_ratio",),
        lambda c: not has_critic(c) or c.critic.schedule != "constant",
        "a constant learning rate does not decay",
        ("critic.schedule", "mode"),
        'set critic.schedule = "cosine"',
    ),
)


@check()
def settings_have_an_effect(context: Context) -> Iterator[Diagnostic]:
    reported: set[str] = set()
    for rule in RULES:
        if any(context.is_unresolved(cause) for cause in rule.causes) or rule.when(context.config):
            continue
        for key in _set_keys(context, rule):
            if key not in reported:
                reported.add(key)
                yield _without_effect(context, rule, key)


def _set_keys(context: Context, rule: Rule) -> Iterator[str]:
    """The rule's keys that a layer sets to something other than the default."""
    for key in dict.fromkeys(_field_key(key) for key in context.origins):
        covered = any(key == each or (each.endswith(".*") and key.startswith(each[:-1])) for each in rule.keys)
        if covered and key not in rule.causes and not context.is_unresolved(key) and not _is_default(context, key):
            yield key


def _field_key(key: str) -> str:
    """The key of the setting; for an entry such as data.task_args.digits, the key of its free table."""
    parts = key.split(".")
    return ".".join(parts[: 3 if parts[0] == "teachers" else 2])


def _is_default(context: Context, key: str) -> bool:
    setting = settings().get(key)
    return setting is not None and bool(context.value(key) == setting.default)


def _without_effect(context: Context, rule: Rule, key: str) -> Diagnostic:
    cause = max(rule.causes, key=context.layer)
    overtaken = context.layer(cause) > context.layer(key)
    advice = f"no change needed if {cause} is right; otherwise" if overtaken else "delete it, or"
    return context.report(
        "W303" if overtaken else "E303",
        f"{key} has no effect: {rule.because}",
        (key, *(each for each in rule.causes if context.origin(each))),
        fix=f"{advice} {rule.fix}",
        on_key=True,
    )
