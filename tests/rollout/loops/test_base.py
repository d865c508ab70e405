from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError
from tqppo.protocols import RolloutEngine, Sampling
from tqppo.rollout.loops.base import BUILT_IN, AgentLoop, RunsSessions, Session, check_loop, load_loop
from tqppo.rollout.loops.single_turn import SingleTurn

OWN_LOOP = """
class Twice:
    def __init__(self, times=2):
        self.times = times

    async def run(self, prompt, llm):
        return []

class NotALoop:
    pass
"""


def test_built_in_loops_are_known_by_name() -> None:
    assert isinstance(load_loop("single_turn", {}), SingleTurn)


def test_a_user_s_loop_comes_from_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loop_of_test.py").write_text(OWN_LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/own_loop_of_test.py:Twice", "own_loop_of_test:Twice"):
        loop = load_loop(name, {"times": 3})
        assert isinstance(loop, RunsSessions)
        assert vars(loop) == {"times": 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tool", "neither built in"),
        ("module:", "neither built in"),
        ("/nowhere/x.py:Loop", "there is no file /nowhere/x.py"),
        ("{folder}/own.py:Missing", "has no class 'Missing'"),
        ("{folder}/own.py:NotALoop", "has no method `async run"),
    ],
)
def test_names_that_are_no_loop_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP)
    with pytest.raises(ConfigError, match=message):
        load_loop(name.format(folder=tmp_path), {})


class Configured(AgentLoop):
    def __init__(self, times: int) -> None:
        self.times = times

    @classmethod
    def check(cls, args: Mapping[str, object]) -> None:
        if args["times"] == 0:
            raise ConfigError("times must not be 0")


def test_arguments_are_checked_by_signature_and_by_the_loop_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "configured", f"{__name__}:Configured")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    check_loop("configured", {"times": 2})
    with pytest.raises(ConfigError, match="agent_args do not fit the agent loop 'configured': missing a required"):
        check_loop("configured", {})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'tims'"):
        check_loop("configured", {"times": 2, "tims": 1})
    with pytest.raises(ConfigError, match="times must not be 0"):
        load_loop("configured", {"times": 0})


def test_a_loop_without_run_says_so() -> None:
    prompt = Prompt("p0", 0, [1], "a", "sort", {}, "text")
    llm = Session(cast(RolloutEngine, None), Sampling(), (0,), (0,))
    with pytest.raises(NotImplementedError, match="Configured has no `run`"):
        asyncio.run(Configured(1).run(prompt, llm))
