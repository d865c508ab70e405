"""`--unset` takes back what presets, files and variables set, and nothing else."""

from __future__ import annotations

from tqppo.config.compile import compile_config
from tqppo.config.read.unset import is_unset
from tqppo.config.sections import ActorSection


def test_the_default_holds_again_unless_it_is_set_on_the_command_line() -> None:
    default = ActorSection().lr
    assert (
        compile_config("quickstart", environ={"TQPPO__ACTOR__LR": "0.5"}, unset=["actor.lr"]).draft.actor.lr == default
    )
    assert compile_config("quickstart", (), ["actor.lr=0.25"], {}, unset=["actor.lr"]).draft.actor.lr == 0.25


def test_a_section_is_unset_as_a_whole() -> None:
    assert compile_config("quickstart", environ={}, unset=["actor"]).draft.actor == ActorSection()
    assert is_unset(("data", "task_args", "digits"), ["data.task_args"])
    assert not is_unset(("data", "size"), ["data.s"])
