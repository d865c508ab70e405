"""Finds or makes the models of a run's teachers. `build` calls it before any of them starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqppo import space
from tqppo.builtin import TASK
from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, demonstrations
from tqppo.devices.seats import NO_CPU
from tqppo.errors import DeadlineExceeded, WorkerError
from tqppo.processes.hosting import Call, Hosting, Launcher, Watch, cause_of, first_ended
from tqppo.processes.job import Job
from tqppo.run import configure
from tqppo.tiny.teachers import TaskSplit, TeacherProgress, TeacherRecipe, cache_folder, find_teacher, make_teacher

# Shows the user what takes time; what it yields shows how far that is.
Announce = Callable[[str], AbstractContextManager[Callable[[str], None]]]
POLL_S = 0.5
TEACHER_TIMEOUT_S = 4 * 3600.0  # they are tiny: minutes on one core
REPORT_EVERY = 10  # steps
TEACHER_PROBLEMS = 100_000  # that a teacher may learn from


def prepare_teachers(
    config: Config, student: str, work: Path, announce: Announce, launcher: Launcher
) -> dict[str, str]:
    """The folder or hub name of each teacher's model. `student` is that of the student, `work` a folder of this run.

    A teacher that is made for a task is trained here, unless the user's cache has it; all of them at once.
    """
    if not facts.has_teachers(config):
        return {}
    known = facts.named_models(config) | dict.fromkeys(facts.student_teachers(config), student)
    tasks = facts.task_teachers(config)
    recipe, rows = configure.teacher_recipe(config), {name: task_rows(config, task) for name, task in tasks.items()}
    folder = cache_folder()
    found = {name: find_teacher(task, recipe, rows[name], folder) for name, task in tasks.items()}
    missing = {name: tasks[name] for name, path in found.items() if path is None}
    if missing:
        with announce(f"making teachers: {', '.join(missing)}") as show:
            made = _make(missing, recipe, rows, folder, work, show, launcher)
    else:
        made = {}
    paths = known | {name: path for name, path in found.items() if path is not None} | made
    return {name: paths[name] for name in config.teachers}


def task_rows(config: Config, task: str) -> TaskSplit:
    """The problems that a teacher learns from; the same in every run, so that all seeds have the same teacher."""
    spec = replace(DataSpec.of(config.data), train=f"{TASK}{task}", size=TEACHER_PROBLEMS)
    opened = partial(demonstrations, spec, seed=0)
    return TaskSplit(training=opened, held_out=partial(opened, held_out=True))


def _make(
    tasks: Mapping[str, str],
    recipe: TeacherRecipe,
    rows: Mapping[str, TaskSplit],
    folder: Path,
    work: Path,
    show: Callable[[str], None],
    launcher: Launcher,
) -> dict[str, str]:
    """Train each teacher in a process of its own; what they report is shown."""
    work.mkdir(parents=True, exist_ok=True)
    notes = {name: (work / f".{name}.progress").resolve() for name in tasks}
    jobs = {name: launcher.launch(Hosting(NO_CPU), Job) for name in tasks}
    try:
        calls = {
            name: jobs[name].call(Job.run, train_teacher, task, recipe, rows[name], str(folder), str(notes[name]))
            for name, task in tasks.items()
        }
        made = _await(calls, launcher.watch(jobs), lambda: show(", ".join(f"{n} {_note(p)}" for n, p in notes.items())))
    finally:
        for job in jobs.values():
            job.kill()
    for path in notes.values():
        path.unlink(missing_ok=True)
    return made


def _await(calls: Mapping[str, Call[str]], watch: Watch, show: Callable[[], None]) -> dict[str, str]:
    """The results by name. Raises what a training raised, and for one that stands still or takes too long."""
    pending, deadline = dict(calls), time.monotonic() + TEACHER_TIMEOUT_S
    while pending:
        ended = first_ended(list(pending.values()), POLL_S)
        for name in [name for name, call in pending.items() if call in ended]:
            if (error := pending.pop(name).future.exception()) is not None:
                raise cause_of(error, f"making teacher {name}")
        show()
        if still := watch.still():
            raise WorkerError(f"making teachers: {'; '.join(still)}")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"making teachers did not finish within {TEACHER_TIMEOUT_S:g} s: {', '.join(pending)}"
            )
    return {name: call.result() for name, call in calls.items()}


def train_teacher(task: str, recipe: TeacherRecipe, rows: TaskSplit, folder: str, note: str) -> str:
    """Runs in a process of its own, and writes into `note` how far it is."""

    def report(progress: TeacherProgress) -> None:
        if progress.step % REPORT_EVERY == 0:
            space.write_whole(Path(note), f"step {progress.step}, {progress.accuracy:.0%} right".encode())

    return make_teacher(task, recipe, rows, Path(folder), report)


def _note(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return "…"
