"""`train` and `resume`: from a compiled config to a finished run. The CLI imports this only to train."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqppo import space
from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.sections import Config
from tqppo.config.show.export import flat, origins_json, resolved_toml
from tqppo.display.display import Display, Ending
from tqppo.errors import CheckpointError, ConfigError, PreflightError
from tqppo.metrics import files as metrics_files
from tqppo.metrics import trackers
from tqppo.metrics.files import EventLog, MetricsLog
from tqppo.run.checkpoint import Checkpoint, CheckpointStore, find_run, open_checkpoint
from tqppo.run.cluster import ray_cluster
from tqppo.run.folder import RunFolder, new_run
from tqppo.run.lock import RunLock
from tqppo.run.loop import Loop, Schedule
from tqppo.run.signals import Aborted, StopRequest

if TYPE_CHECKING:
    from tqppo.run.live import LiveRun

# What a resumed run may change: how long it goes on, what it writes, how patient it is. Nothing that it computes.
MAY_CHANGE = (
    "run.max_steps",
    "run.dir",
    "logging.",
    "checkpoint.",
    "storage.timeout_s",
    "storage.budget_gb",
    "storage.dir",
    "rollout.timeout_s",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.max_restarts",
    "cluster.address",
)


def train(compilation: Compilation, *, verbosity: int = 0) -> int:
    """A new run. Returns the exit code."""
    config = compilation.config
    assert config is not None, "only a config that compiles is trained"
    refuse_what_is_not_there(config, compilation.name)
    trackers.check(config.logging.trackers)
    folder = new_run(Path(config.run.dir), config.run.name, preset=compilation.name, model=config.model.path)
    with RunLock(folder.path):
        space.write_whole(folder.config, resolved_toml(compilation.draft).encode())
        space.write_whole(folder.origins, origins_json(compilation).encode())
        return Attempt(config, folder, None, verbosity).run()


def resume(
    checkpoint: str, overrides: list[str], *, max_steps: int | None = None, fork: str = "", verbosity: int = 0
) -> int:
    """Go on with a run where its checkpoint left off. Returns the exit code."""
    path, wanted = find_run(checkpoint, Path(os.environ.get("TQPPO__RUN__DIR", "runs")))
    folder, log = RunFolder(path), logging.getLogger(__name__)
    changes = [*overrides, *([f"run.max_steps={max_steps}"] if max_steps else [])]
    with RunLock(folder.path):
        found = _checkpoint_of(folder, wanted, log.warning)
        config = resumed_config(folder, changes)
        if not fork:
            return _go_on(config, folder, found, verbosity)
        forked = fork_run(folder, fork, found)
    with RunLock(forked.path):
        return _go_on(config, forked, found, verbosity)


def _checkpoint_of(folder: RunFolder, wanted: Path | None, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to resume from. Whatever is wrong with it is found before anything is changed."""
    if wanted is not None:
        return open_checkpoint(wanted)
    try:
        return CheckpointStore(folder.checkpoints).newest(warn)
    except CheckpointError as error:
        again = f"tqppo train --config {folder.config} --name NEW-NAME"
        raise CheckpointError(f"{error}\nTo train it again from the start: {again}") from None


def _go_on(config: Config, folder: RunFolder, found: Checkpoint, verbosity: int) -> int:
    if found.step >= config.run.max_steps:
        Display(folder.name, quiet=verbosity < 0).note(
            f"{folder.path} is complete: step {found.step} of {config.run.max_steps} is done, nothing was trained. "
            f"To go on: tqppo resume --checkpoint {folder.name} --max-steps {found.step * 2}"
        )
        return 0
    return Attempt(config, folder, found, verbosity).run()


def refuse_what_is_not_there(config: Config, name: str) -> None:
    """Modes and agent loops whose trainer is not part of this version, by name."""
    if config.mode == "distill":
        raise PreflightError(f"{name}: training in mode distill is not there yet; validate-config and the plan are")
    if config.rollout.agent in ("tools", "rewrite"):
        raise PreflightError(
            f"{name}: the agent loop {config.rollout.agent!r} is not there yet; "
            "use single_turn, or your own loop as module:Class"
        )


def resumed_config(folder: RunFolder, overrides: list[str]) -> Config:
    """The run's own config with these changes, all of which must leave its results alone."""
    before = _compiled(folder, [])
    after = _compiled(folder, overrides)
    old, new = dict(flat(before)), dict(flat(after))
    refused = [
        f"  {key}: {old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if refused:
        changes = "\n".join(refused)
        raise CheckpointError(
            f"a resumed run must compute what it would have computed; these settings would change that:\n{changes}\n"
            f"These may change: {', '.join(key.rstrip('.') for key in MAY_CHANGE)}. For anything else start a new run"
        )
    return after


def _compiled(folder: RunFolder, overrides: list[str]) -> Config:
    compilation = compile_config(None, [folder.config], overrides, environ={})
    if compilation.config is None:
        raise ConfigError(render_text(compilation.diagnostics))
    return compilation.config


def fork_run(folder: RunFolder, name: str, checkpoint: Checkpoint) -> RunFolder:
    """A copy of the run up to the checkpoint, under another name."""
    fork = new_run(folder.path.parent, name, preset="", model="")
    for path in (folder.config, folder.origins, folder.metrics):
        if path.exists():
            shutil.copy(path, fork.path)
    if folder.model.exists():
        shutil.copytree(folder.model, fork.model)
    shutil.copytree(checkpoint.folder, fork.checkpoints / checkpoint.folder.name)
    return fork


@dataclass
class Attempt:
    """One start of a run: builds everything, trains, takes everything down."""

    config: Config
    folder: RunFolder
    checkpoint: Checkpoint | None
    verbosity: int

    def run(self) -> int:
        logs = self.folder.next_attempt()
        self.start = self.checkpoint.step if self.checkpoint else 0
        damage = metrics_files.cut(self.folder.metrics, self.start) if self.checkpoint else ""
        if damage:
            logging.getLogger(__name__).warning(damage)
        self.display = Display(
            self.folder.name,
            subtitle=f"{self.config.mode} · {self.config.model.path} · {self.config.rollout.backend}",
            max_steps=self.config.run.max_steps,
            quiet=self.verbosity < 0,
        )
        if self.checkpoint and self.folder.metrics.exists():
            self.display.recall(metrics_files.read(self.folder.metrics))
        self.events = EventLog(self.folder.events)
        self.is_training = False
        self.events.write("start", step=self.start, logs=str(logs))
        code = 1
        try:
            with StopRequest(self._stopping) as stop:
                code = self._train(stop, logs)
        except Aborted:
            code = 128 + stop.number
        finally:
            self.events.write("end", exit_code=code)
        return code

    def _stopping(self, name: str) -> None:
        what = "finishing this step, then saving" if self.is_training else "stopping before the first step"
        self.display.note(f"{name}: {what}; once more aborts at once")

    def _train(self, stop: StopRequest, logs: Path) -> int:
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(self.display)
            with self.display.stage("starting Ray"):
                stack.enter_context(
                    ray_cluster(
                        config.cluster.address,
                        num_cpus=os.cpu_count() or 1,
                        object_store_bytes=self._object_store_bytes(),
                        logs=logs,
                    )
                )
            stop.listen_again()
            run = self._build(logs, stack)
            self.trackers = trackers.load(
                config.logging.trackers,
                self.folder.path,
                project=config.logging.project,
                config=dict(flat(config)),
                first_step=self.start + 1 if self.checkpoint else 0,
            )
            stack.callback(self.trackers.close)
            stack.callback(stop.ignore)  # the first of all that takes down
            loop = self._loop(run, stop)
            self.is_training = True
            code = loop.run(self.start)
            self._print_ending(code)
        return code

    def _object_store_bytes(self) -> int:
        return int(self.config.storage.budget_gb * 2**30) if self.config.storage.backend == "ray" else 0

    def _build(self, logs: Path, stack: ExitStack) -> LiveRun:
        from tqppo.run.build import build

        run = build(self.config, self.folder, logs, stack, self.display.stage)
        if self.checkpoint is not None:
            with self.display.stage(f"loading the checkpoint of step {self.start}"):
                run.load(self.checkpoint.folder, self.checkpoint.driver_state(), self.start)
        return run

    def _loop(self, run: LiveRun, stop: StopRequest) -> Loop:
        config = self.config
        return Loop(
            step=run.trainer.step,
            schedule=Schedule(
                max_steps=config.run.max_steps,
                validate_every=config.validation.interval,
                validate_before=config.validation.before_train,
                save_every=config.checkpoint.interval,
                save_on_exit=config.checkpoint.save_on_exit,
                saves_or_stops=config.checkpoint.on_full_disk == "stop",
            ),
            stop=stop,
            store=CheckpointStore(
                self.folder.checkpoints,
                keep_last=config.checkpoint.keep_last,
                keep_every=config.checkpoint.keep_every,
                run_files=self.folder.files_of_resume,
            ),
            log=self._log,
            validate=run.validate,
            measure=run.measure,
            leftovers=run.leftovers,
            save_parts=run.save,
            driver_state=run.driver_state,
            export=lambda: self._export(run),
            checkpoint_bytes=run.checkpoint_bytes,
            warn=self._warn,
        )

    def _warn(self, message: str) -> None:
        self.display.note(message)
        self.events.write("warning", message=message)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        MetricsLog(self.folder.metrics).write(step, metrics)
        self.trackers.log(step, metrics)
        self.display.step(step, metrics)

    def _export(self, run: LiveRun) -> None:
        if not self.config.checkpoint.export:
            return
        with self.display.stage("exporting the model"):
            partial = self.folder.export.with_name(".partial-hf")
            shutil.rmtree(partial, ignore_errors=True)
            run.export(partial)
            shutil.rmtree(self.folder.export, ignore_errors=True)
            partial.rename(self.folder.export)

    def _print_ending(self, code: int) -> None:
        folder, name = self.folder, self.folder.name
        steps = f"{self.display.progress.step} of {self.config.run.max_steps} steps"
        places = {"run": str(folder.path), "metrics": str(folder.metrics), "checkpoints": str(folder.checkpoints)}
        resume = f"tqppo resume --checkpoint {name}"
        is_saved = any(folder.checkpoints.glob("step_*"))
        if code:
            self.display.finish(
                Ending(f"stopped after {steps}", places, [(resume, "go on from here")] if is_saved else [])
            )
            return
        if self.config.checkpoint.export:
            places["model"] = str(folder.export)
        longer = (f"{resume} --max-steps {self.config.run.max_steps * 2}", "train longer")
        self.display.finish(Ending(f"finished {steps}", places, [longer] if is_saved else []))
