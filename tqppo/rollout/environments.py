"""Text environments in the shape of gyms: `reset` begins an episode, `step` takes what the model says.

The loop `environment` plays sessions in them. `skyrl:NAME` is one of the package skyrl-gym (extra `skyrl`), yours is
`module:Class` or `file.py:Class`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from tqppo import plugins
from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError, PreflightError

SKYRL = "skyrl:"
Observation = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Step:
    """What follows an action: the observation as text or as messages, its reward, and whether the episode is over."""

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Any) -> Step:
        """A step as environments return it: a Step, `(observation, reward, done)` with or without an info, or
        gymnasium's `(observation, reward, terminated, truncated, info)`."""
        match result:
            case Step():
                return result
            case (observation, reward, terminated, truncated, dict()):
                return cls(observation, float(reward), bool(terminated or truncated))
            case (observation, reward, done) | (observation, reward, done, dict()):
                return cls(observation, float(reward), bool(done))
        raise TypeError(f"step() should return Step(observation, reward, done), not {result!r:.80}")


class Environment:
    """Base class of environments; `rollout.agent_args.args` are the arguments of its constructor.

    Each session has an object of its own. Methods may be coroutines; others run in a thread, so that a slow step does
    not hold up other sessions. A number to guess:

        class GuessNumber(Environment):
            def reset(self, prompt: Prompt) -> str:
                self.number = int(str(prompt.answer))
                return "Guess my number."

            def step(self, action: str) -> Step:
                if action.strip() == str(self.number):
                    return Step(reward=1.0, done=True)
                return Step("Larger." if int(action) < self.number else "Smaller.")
    """

    def reset(self, prompt: Prompt) -> Observation:
        """Begin the episode of a prompt; returns what the model sees first. Empty: the prompt as the dataset has it."""
        return ""

    def step(self, action: str) -> Step:
        """Take an action of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no `step`")

    def close(self) -> None:
        """End what the episode holds. Called once, however the session ends."""


class SkyrlEnvironment(Environment):
    """An environment of skyrl-gym, made for each prompt with its answer and columns."""

    def __init__(self, name: str, **config: object) -> None:
        self.name, self.config = name, config

    def reset(self, prompt: Prompt) -> Observation:
        import omegaconf
        import skyrl_gym

        columns = {
            **prompt.extra,
            "data_source": prompt.source,
            "reward_spec": {"method": "rule", "ground_truth": prompt.answer},
            "extra_info": prompt.extra,
            **self.config,
        }
        self.inner = skyrl_gym.make(self.name, env_config=omegaconf.OmegaConf.create(self.config), extras=columns)
        messages, _ = self.inner.init(prompt.messages or [{"role": "user", "content": prompt.text}])
        return cast("list[Message]", messages)

    def step(self, action: str) -> Step:
        output = self.inner.step(action)
        metrics = {name: float(value) for name, value in self.inner.get_metrics().items() if _is_number(value)}
        return Step(output["observations"], float(output["reward"]), bool(output["done"]), metrics)

    def close(self) -> None:
        if hasattr(self, "inner"):
            self.inner.close()


def find_environment(name: str) -> Callable[..., Environment]:
    """What makes an environment from its arguments, once per session; ConfigError if there is none of this name."""
    if name.startswith(SKYRL):
        _check_skyrl(name.removeprefix(SKYRL))
        return partial(SkyrlEnvironment, name.removeprefix(SKYRL))
    if ":" not in name:
        raise ConfigError(f"rollout.agent_args.environment {name!r} is not skyrl:NAME, module:Class or file.py:Class")
    found = _imported(name)
    if not isinstance(found, type) or not callable(getattr(found, "step", None)):
        raise ConfigError(f"rollout.agent_args.environment {name!r} is not a class with a method `step(action)`")
    return cast("type[Environment]", found)


def _imported(name: str) -> object:
    try:
        return plugins.import_own(name)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"rollout.agent_args.environment {name!r} cannot be imported: {error}") from error


def _check_skyrl(name: str) -> None:
    try:
        import skyrl_gym
    except ImportError:
        raise PreflightError(f"environment {SKYRL}{name} needs skyrl-gym: pip install 'tqppo[skyrl]'") from None
    if name not in skyrl_gym.registry:
        known = ", ".join(sorted(skyrl_gym.registry))
        raise ConfigError(f"rollout.agent_args.environment: skyrl-gym has no {name!r}; it has {known}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
