"""Tiny teachers: they learn their task, stay in the cache, and are whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tqppo.data.prompts import DataSpec, demonstrations
from tqppo.errors import PreflightError
from tqppo.tiny import teachers
from tqppo.tiny.teachers import TaskSplit, TeacherProgress, TeacherRecipe, find_teacher, make_teacher

RECIPE = TeacherRecipe(
    "llama", 32, 1, 1, True, batch_size=64, warmup_steps=5, cooling_steps=10, max_steps=300, least_accuracy=0.9
)
QUICK = replace(RECIPE, max_steps=2, least_accuracy=0.0)


def copies(task: str = "copy", *, letters: str = "ab") -> TaskSplit:
    """A task that is learned within seconds: repeat the one letter."""
    rows = [([{"role": "user", "content": letter}], letter) for letter in letters * 50]
    return TaskSplit(partial(list, rows), partial(list, rows[:20]))


def ignore(progress: TeacherProgress) -> None:
    """Reports nothing."""


def marker(folder: str) -> dict[str, Any]:
    """What is noted of a finished teacher, such as the share of held-out problems that it solves."""
    found: dict[str, Any] = json.loads((Path(folder) / teachers.MARKER).read_text())
    return found


def _bytes(folder: str) -> str:
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def test_a_teacher_learns_its_task_and_stops_when_it_has(tmp_path: Path) -> None:
    seen: list[TeacherProgress] = []
    folder = make_teacher("copy", RECIPE, copies(), tmp_path, seen.append)
    assert marker(folder)["accuracy"] == 1.0
    assert len(seen) == seen[-1].step < RECIPE.max_steps
    assert seen[-1].accuracy > seen[0].accuracy
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


def test_a_finished_teacher_is_found_again_and_another_recipe_is_another_teacher(tmp_path: Path) -> None:
    assert find_teacher("copy", QUICK, copies(), tmp_path) is None
    first = make_teacher("copy", QUICK, copies(), tmp_path, ignore)
    assert find_teacher("copy", QUICK, copies(), tmp_path) == first
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert make_teacher("copy", QUICK, copies(), tmp_path, ignore) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    for other, rows in ((replace(QUICK, seed=1), copies()), (QUICK, copies(letters="abc"))):
        assert make_teacher("copy", other, rows, tmp_path, ignore) != first


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make_teacher("copy", QUICK, copies(), tmp_path / "a", ignore)
    assert _bytes(first) == _bytes(make_teacher("copy", QUICK, copies(), tmp_path / "b", ignore))


def test_what_a_killed_attempt_left_is_made_anew(tmp_path: Path) -> None:
    folder = Path(make_teacher("copy", QUICK, copies(), tmp_path, ignore))
    (folder / teachers.MARKER).unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".{folder.name}").mkdir()
    make_teacher("copy", QUICK, copies(), tmp_path, ignore)
    AutoModelForCausalLM.from_pretrained(folder)
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == [folder.name]


def test_a_task_that_is_too_hard_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"task:copy solves only \d+% of held-out problems after 2 steps"):
        make_teacher("copy", replace(QUICK, least_accuracy=0.95), copies(), tmp_path, ignore)
    assert [each for each in tmp_path.iterdir() if each.is_dir()] == []


def test_two_runs_at_once_make_a_teacher_once(tmp_path: Path) -> None:
    steps: list[int] = []
    made: list[str] = []

    def make(report: Callable[[TeacherProgress], None]) -> None:
        made.append(make_teacher("copy", QUICK, copies(), tmp_path, report))

    threads = [threading.Thread(target=make, args=[lambda progress: steps.append(progress.step)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert steps == [1, 2]


def test_the_cache_is_the_users_or_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TQPPO_TEACHERS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert teachers.cache_folder() == tmp_path / "tqppo" / "teachers"
    monkeypatch.setenv("TQPPO_TEACHERS", "~/mine")
    assert teachers.cache_folder() == Path.home() / "mine"


@pytest.mark.long
@pytest.mark.parametrize("task", ["sort", "reverse"])
def test_the_teachers_of_the_preset_solve_held_out_problems(task: str, tmp_path: Path) -> None:
    data = DataSpec(train=f"task:{task}", size=100_000)
    rows = TaskSplit(partial(demonstrations, data, seed=0), partial(demonstrations, data, seed=0, held_out=True))
    folder = make_teacher(task, TeacherRecipe("llama", 64, 2, 2, True), rows, tmp_path, ignore)
    assert marker(folder)["accuracy"] >= 0.95
    assert marker(folder)["steps"] <= 600
