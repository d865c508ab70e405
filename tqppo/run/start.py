"""`train` and `resume`: from a compiled config to a finished run. The CLI imports this only to train."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tqppo import space
from tqppo.config.checks.machine import check_machine
from tqppo.config.checks.registry import Context
from tqppo.config.compilation import Compilation, Origins
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.plan.machine import on_this_machine, this_machine
from tqppo.config.sections import Config
from tqppo.config.show.export import flat, origins_json, resolved_toml
from tqppo.display.display import Display
from tqppo.errors import CheckpointError, ConfigError
from tqppo.metrics import trackers
from tqppo.rollout.loops.base import check_loop
from tqppo.run.attempt import Attempt, Callback
from tqppo.run.branch import branch, what_changes
from tqppo.run.checkpoint import Checkpoint, CheckpointStore, NewerFormat, find_run
from tqppo.run.folder import RunFolder, new_run, runs_folder
from tqppo.run.lock import RunLock

# Settings that a resume may change: length, outputs and deadlines. None of them changes a result.
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
    "distillation.timeout_s",
    "distillation.retries",
    "distillation.cache_gb",
    "distillation.on_teacher_failure",
    "cluster.address",
    "cluster.in_process",
    "cluster.gpu_memory_gb",
    "cluster.cpus_per_worker",
    "cluster.colocate",
)
# Settings of memory and placement, which a resume may change too. They change the order in which numbers are added up.
MAY_ROUND = (
    *(f"{role}.ranks" for role in ("actor", "critic", "reference", "reward_model")),
    *(f"{role}.context_parallel" for role in ("actor", "critic", "reference", "reward_model")),
    *(f"{role}.micro_batch_tokens" for role in ("actor", "critic", "reference", "reward_model")),
    "actor.gradient_checkpointing",
    "critic.gradient_checkpointing",
    "rollout.replicas",
    "rollout.memory_fraction",
    "cluster.nodes",
    "cluster.shard_within_nodes",
    "cluster.gpus_per_node",
    "run.threads",
    "run.cores",
)


def train(
    compilation: Compilation,
    *,
    verbosity: int = 0,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> int:
    """A new run. Returns the exit code. `overwrite` removes a run of the same name, even if it has trained.

    `callbacks` get every step's metrics; `on_folder` gets the run's folder once it is made.
    """
    compilation = on_this_machine(compilation)
    config = compilation.config
    assert config is not None, "only a config that compiles is trained"
    check_loop(config.rollout.agent, config.rollout.agent_args)
    trackers.check(config.logging.trackers)
    _check_room(config, Path(config.run.dir), compilation.origins)
    folder = new_run(
        Path(config.run.dir),
        config.run.name,
        preset=compilation.name,
        model=config.model.path,
        overwrite=overwrite,
    )
    with RunLock(folder.path) as lock:
        folder.refuse_if_taken(overwrite=overwrite)  # another process may have trained here meanwhile
        folder.clear()
        on_folder(folder.path)
        space.write_whole(folder.config, resolved_toml(compilation.draft).encode())
        space.write_whole(folder.origins, origins_json(compilation).encode())
        return Attempt(config, folder, None, lock, verbosity, callbacks).run()


def resume(
    checkpoint: str,
    overrides: list[str],
    *,
    max_steps: int | None = None,
    fork: str = "",
    verbosity: int = 0,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Go on with a run where its checkpoint left off. Returns the exit code."""
    path, wanted = find_run(checkpoint, runs_folder())
    folder, log = RunFolder(path), logging.getLogger(__name__)
    changes = [*overrides, *([f"run.max_steps={max_steps}"] if max_steps else [])]
    with ExitStack() as source:
        lock = source.enter_context(RunLock(folder.path))
        folder.refuse_odd_files()
        found = _checkpoint_of(folder, wanted, log.warning)
        notes = rounding(folder, changes)
        if not fork:
            config = resumed_config(folder, changes)
            notes += refilling(config, found)
            return _go_on(Attempt(config, folder, found, lock, verbosity, callbacks, notes))
        changed = changed_results(folder, changes)
        if not changed:
            _check_room(resumed_config(folder, changes), folder.path, {})
        forked = new_run(folder.path.parent, fork, preset="", model="")
        with RunLock(forked.path) as lock:
            forked.refuse_if_taken(overwrite=False)  # another process may have trained here meanwhile
            forked.clear()
            if changed:
                compilation = _branched(folder, forked, found, changes)
                source.close()
                Display(forked.name, quiet=verbosity < 0).note(what_changes(folder, found.step, changed))
                return Attempt(compilation.draft, forked, None, lock, verbosity, callbacks).run()
            copied = copy_run(folder, forked, found)
            source.close()  # the fork needs nothing more of it
            config = resumed_config(folder, changes)
            notes += refilling(config, copied)
            return _go_on(Attempt(config, forked, copied, lock, verbosity, callbacks, notes))


def _branched(folder: RunFolder, forked: RunFolder, found: Checkpoint, changes: list[str]) -> Compilation:
    """A new run with other settings, from the checkpoint's weights. One that cannot be made leaves no folder."""
    try:
        compilation = branch(folder, forked, found, changes)
        _check_room(compilation.draft, forked.path, compilation.origins)
        space.write_whole(forked.config, resolved_toml(compilation.draft).encode())
        space.write_whole(forked.origins, origins_json(compilation).encode())
    except BaseException:  # a signal, too
        shutil.rmtree(forked.path, ignore_errors=True)
        raise
    return compilation


def _check_room(config: Config, folder: Path, origins: Origins, *, taken_bytes: int = 0) -> None:
    """Raise PreflightError if this machine, or the disk of the folder, is too small for the run.

    `taken_bytes` of the disk hold earlier files of the run, which new ones replace.
    """
    machine = this_machine(folder)
    check_machine(Context(config, origins), replace(machine, disk=machine.disk + taken_bytes))


def _store(folder: RunFolder) -> CheckpointStore:
    return CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)


def _checkpoint_of(folder: RunFolder, wanted: Path | None, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to resume from. Whatever is wrong with it is found before anything is changed."""
    if wanted is not None:
        return _store(folder).open(wanted)
    try:
        return _store(folder).newest(warn)
    except NewerFormat:
        raise
    except CheckpointError as error:
        if str(folder.config) in str(error):  # damaged: a run from it would train with other settings
            raise
        again = f"tqppo train --config {folder.config} --name NEW-NAME"
        raise CheckpointError(f"{error}\nTo train it again from the start: {again}") from None


def _go_on(attempt: Attempt) -> int:
    config, folder, found = attempt.config, attempt.folder, attempt.checkpoint
    assert found is not None, "a run goes on from a checkpoint"
    is_exported = not config.checkpoint.export or folder.exported.step == found.step
    if found.step >= config.run.max_steps and is_exported:
        _store(folder).remove_partial()  # a process that was killed may have left something
        folder.exported.remove_partial()
        Display(folder.name, quiet=attempt.verbosity < 0).note(
            f"{folder.path} is complete: step {found.step} of {config.run.max_steps} is done, nothing was trained. "
            f"To go on: tqppo resume {folder.name} --max-steps {found.step * 2}"
        )
        return 0
    _check_room(config, folder.path, {}, taken_bytes=folder.saved_bytes())
    return attempt.run()


def resumed_config(folder: RunFolder, overrides: list[str]) -> Config:
    """The run's own config with these changes, all of which must leave its results alone."""
    refused = changed_results(folder, overrides)
    if refused:
        changes = "\n".join(refused)
        raise CheckpointError(
            f"a resumed run must give the results of an unbroken one; these settings would change them:\n{changes}\n"
            f"These may change: {', '.join(key.rstrip('.') for key in MAY_CHANGE)}; up to rounding also "
            f"{', '.join(MAY_ROUND)}. For anything else start a new run, or fork this one: --fork NAME starts from its "
            "weights with other settings"
        )
    return _compiled(folder, overrides)


def changed_results(folder: RunFolder, overrides: list[str]) -> list[str]:
    """Each setting that would change the run's results by more than rounding, with both values."""
    changed = _changed(folder, overrides)
    return [f"  {key}: {values}" for key, values in changed.items() if not key.startswith((*MAY_CHANGE, *MAY_ROUND))]


def rounding(folder: RunFolder, overrides: list[str]) -> list[str]:
    """What to tell the user if the run goes on with other memory or placement: equal to the bit it is no longer."""
    found = [f"{key}: {values}" for key, values in _changed(folder, overrides).items() if key.startswith(MAY_ROUND)]
    if not found:
        return []
    return [
        f"{', '.join(found)}. Numbers may now be added up in another order: from here the run equals one that was not "
        "interrupted up to rounding, and no longer to the bit"
    ]


def refilling(config: Config, found: Checkpoint) -> list[str]:
    """What to tell the user if a run that had ended goes on with `rollout.ahead`: no groups wait for its next steps."""
    wanted = min(config.rollout.ahead, config.run.max_steps - found.step)
    if wanted <= len(found.driver_state().get("ahead", [])):
        return []
    return [
        f"nothing was sampled for the steps after {found.step}, which was the last one: the next {wanted} train "
        "on groups of newer weights than those of a run that was as long from the start (rollout.ahead)"
    ]


def _changed(folder: RunFolder, overrides: list[str]) -> dict[str, str]:
    """Each setting that the overrides change, with both values."""
    old, new = dict(flat(_compiled(folder, []))), dict(flat(_compiled(folder, overrides)))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _compiled(folder: RunFolder, overrides: list[str]) -> Config:
    compilation = compile_config(None, [folder.config], overrides, environ={})
    if compilation.config is None:
        raise ConfigError(render_text(compilation.diagnostics))
    return compilation.config


def copy_run(folder: RunFolder, fork: RunFolder, checkpoint: Checkpoint) -> Checkpoint:
    """Copy a run up to the checkpoint into the empty folder of another; returns the copy, checked like any checkpoint.

    A copy that fails leaves no folder behind.
    """
    copied = fork.checkpoints / checkpoint.folder.name
    try:
        with space.explained(fork.path, sum(path.stat().st_size for path in checkpoint.folder.rglob("*"))):
            for path in (folder.config, folder.origins, folder.metrics):
                if path.exists():
                    shutil.copy(path, fork.path)
            for source, to in ((folder.model, fork.model), (checkpoint.folder, copied)):
                if source.exists():
                    _copy_tree(source, to)
        return _store(fork).open(copied)
    except BaseException:  # a signal, too
        shutil.rmtree(fork.path, ignore_errors=True)
        raise


def _copy_tree(source: Path, to: Path) -> None:
    """Unlike `shutil.copytree`, end at the first error and raise it as it is."""
    to.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            _copy_tree(path, to / path.name)
        else:
            shutil.copy(path, to)
