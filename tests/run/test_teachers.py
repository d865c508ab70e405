"""Where a teacher's model comes from: a folder, the student itself, or a task that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.processes.hosting import Launcher
from tqppo.processes.local import LocalLauncher
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.run import configure
from tqppo.run.teachers import prepare_teachers
from tqppo.tiny.teachers import TeacherRecipe


def config_of(*overrides: str) -> Config:
    compilation = compile_config(None, [], ["mode=distill", *overrides], {})
    assert compilation.config is not None, compilation.diagnostics
    return compilation.config


class Stages:
    """Keeps what the user is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[str], None]]:
        self.shown.append(name)
        yield self.shown.append


def test_named_models_stay_and_the_student_is_the_runs_own_model(tmp_path: Path) -> None:
    config = config_of(
        *('data.train=["task:sort", "task:reverse"]', "teachers.a.path=org/big", 'teachers.a.match=["sort"]'),
        *("teachers.b.path=student", 'teachers.b.match=["reverse"]', 'teachers.b.prompt="{prompt} {answer}"'),
    )
    stages = Stages()
    assert prepare_teachers(config, "run/model", tmp_path, stages, LocalLauncher()) == {
        "a": "org/big",
        "b": "run/model",
    }
    assert stages.shown == []


def test_other_modes_have_no_teachers(tmp_path: Path) -> None:
    config = compile_config(None, [], [], {}).draft
    assert prepare_teachers(config, "run/model", tmp_path, Stages(), LocalLauncher()) == {}


@pytest.mark.parametrize("launches", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_teacher_for_a_task_is_made_once_and_its_training_is_shown(
    launches: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launches == "ray":
        request.getfixturevalue("local_ray")
    launcher: Launcher = RayLauncher() if launches == "ray" else LocalLauncher()
    monkeypatch.setenv("TQPPO_TEACHERS", str(tmp_path / "cache"))
    small = replace(configure.teacher_recipe(config_of("teachers.t.path=t")), max_steps=20, least_accuracy=0.0)

    def recipe(config: Config) -> TeacherRecipe:
        return replace(small, hidden_size=16, num_layers=1, num_heads=1, batch_size=4)

    monkeypatch.setattr(configure, "teacher_recipe", recipe)
    config = config_of("teachers.t.path=task:sort", 'data.train="task:sort"')
    first, again = Stages(), Stages()
    made = prepare_teachers(config, "run/model", tmp_path / "work", first, launcher)
    assert Path(made["t"]).parent == tmp_path / "cache"
    assert first.shown[0] == "making teachers: t"
    assert first.shown[-1].startswith("t step 20, ")
    assert list((tmp_path / "work").iterdir()) == []
    assert prepare_teachers(config, "run/model", tmp_path / "work", again, launcher) == made
    assert again.shown == []
