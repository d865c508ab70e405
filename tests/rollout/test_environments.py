"""Steps in their shapes, and the adapter of skyrl-gym on a package with its interface."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripted import ScriptedEngine, play, prompt_of, session_on

from tqppo.errors import ConfigError, PreflightError
from tqppo.rollout.environments import Environment, Step, find_environment
from tqppo.rollout.loops.environment import EnvironmentLoop

SKYRL = """
class Echo:
    def __init__(self, env_config, extras):
        self.wanted = extras["reward_spec"]["ground_truth"]
        self.most = env_config["most"]
        self.turns = 0

    def init(self, prompt):
        return [{"role": "system", "content": "Echo."}, *prompt], {}

    def step(self, action):
        self.turns += 1
        right = action == self.wanted
        again = [{"role": "user", "content": "No."}]
        done = right or self.turns == self.most
        return {"observations": [] if done else again, "reward": float(right), "done": done, "metadata": {}}

    def get_metrics(self):
        return {"steps": self.turns, "kind": "echo"}

    def close(self):
        pass

registry = {"echo": Echo}

def make(id, **kwargs):
    return registry[id](**kwargs)
"""


@pytest.fixture
def skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skyrl_gym.py").write_text(SKYRL)
    (tmp_path / "omegaconf.py").write_text("class OmegaConf:\n    create = staticmethod(dict)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("skyrl_gym", "omegaconf"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    "result",
    [Step("o", 1.0, True), ("o", 1, True), ("o", 1, True, {}), ("o", 1, False, True, {}), ("o", 1, True, False, {})],
)
def test_steps_of_every_shape_say_the_same(result: object) -> None:
    assert Step.of(result) == Step("o", 1.0, True)


def test_step_of_another_shape_is_an_error() -> None:
    with pytest.raises(TypeError, match="should return Step"):
        Step.of("o")
    with pytest.raises(NotImplementedError, match="Environment has no `step`"):
        Environment().step("")


@pytest.mark.usefixtures("skyrl")
def test_skyrl_environment_is_played_with_the_answer_of_the_row() -> None:
    find_environment("skyrl:echo")
    engine = ScriptedEngine(["1<|end|>", "2<|end|>"])
    loop = EnvironmentLoop("skyrl:echo", args={"most": 3})
    (trajectory,) = play(loop, prompt_of("say it", "2"), session_on(engine))
    assert engine.contexts[0] == "<|system|>Echo.<|user|>say it<|assistant|>"
    assert trajectory.turn_rewards == (0.0, 1.0)
    assert trajectory.metrics == {"steps": 2.0, "is_done": 1.0}


@pytest.mark.usefixtures("skyrl")
def test_unknown_environment_of_skyrl_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no 'sql'; it has echo"):
        find_environment("skyrl:sql")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(PreflightError, match=r"pip install 'tqppo\[skyrl\]'"):
        find_environment("skyrl:gsm8k")
