"""One start of a run: build everything, train, take everything down. `start` calls it for a new or a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.config.show.export import flat
from tqppo.display.display import Display, Ending
from tqppo.errors import ClusterLost, LockLost, OutOfSpace, TqppoError
from tqppo.hub import use_cache_without_network
from tqppo.metrics import files as metrics_files
from tqppo.metrics import trackers
from tqppo.metrics.events import Event
from tqppo.metrics.files import EventLog, MetricsLog
from tqppo.processes import ray_health
from tqppo.processes.garbage import spare_what_started, spared_while_importing
from tqppo.processes.hosting import Launcher
from tqppo.protocols import Metrics
from tqppo.run.background import BackgroundSave
from tqppo.run.checkpoint import Checkpoint, CheckpointStore
from tqppo.run.cluster import Hooks
from tqppo.run.folder import RunFolder
from tqppo.run.launch import launcher_of
from tqppo.run.lock import RunLock
from tqppo.run.loop import Loop, Schedule
from tqppo.run.picture import EXAMPLE, subtitle
from tqppo.run.signals import Aborted, StopRequest
from tqppo.run.summary import START

if TYPE_CHECKING:
    from tqppo.run.live import LiveRun


T = TypeVar("T")
Callback = Callable[[int, Metrics], None]  # gets the number of a step and its metrics


def leave(events: EventLog, message: str) -> None:
    """End the process: Ray is gone, and a call into it does not return."""
    events.write("error", message=message)
    events.write("end", exit_code=ClusterLost.exit_code)
    ray_health.leave(message)


def _after_sync(metrics: MetricsLog, save: Callable[[Path], T]) -> Callable[[Path], T]:
    """`save`, with the metrics on the disk first: a checkpoint without those up to its step would leave a gap."""

    def synced(folder: Path) -> T:
        metrics.sync()
        return save(folder)

    return synced


@dataclass
class Attempt:
    """One start of a run: builds everything, trains, takes everything down."""

    config: Config
    folder: RunFolder
    checkpoint: Checkpoint | None
    lock: RunLock
    verbosity: int
    callbacks: Sequence[Callback] = ()
    notes: Sequence[str] = ()  # what a resume tells the user

    def __post_init__(self) -> None:
        self.start = self.checkpoint.step if self.checkpoint else 0
        self.store = self._store()

    def run(self) -> int:
        logs = self.folder.next_attempt()
        self.display = Display(
            self.folder.name,
            subtitle=subtitle(self.config.mode, self.config.model.path, self.config.rollout.backend),
            max_steps=self.config.run.max_steps,
            quiet=self.verbosity < 0,
        )
        self.events, self.metrics = EventLog(self.folder.events), MetricsLog(self.folder.metrics)
        self.is_training = False
        self.events.write(START, step=self.start, max_steps=self.config.run.max_steps, logs=str(logs))
        code, stop = 1, StopRequest(self._stopping)
        try:
            with stop:
                code = self._train(stop, logs)
        except Aborted:
            code = 128 + stop.number
        except TqppoError as error:
            code = error.exit_code
            self.events.write("error", message=str(error))
            raise
        finally:
            self._end(code)
        return code

    def _store(self) -> CheckpointStore:
        options = self.config.checkpoint
        return CheckpointStore(
            self.folder.checkpoints,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            run_files=self.folder.files_of_resume,
            check=self.lock.check,
        )

    def go_back(self) -> list[str]:
        """Bring the run's files back to the step of the checkpoint; returns what to tell the user.

        The checkpoints come first, so that a kill in between leaves metrics of too many steps, which the next resume
        cuts, and not of too few.
        """
        self.lock.check()
        self.store.remove_partial()
        later = self.store.set_later_aside(self.start)
        said = metrics_files.cut(self.folder.metrics, self.start)
        if later:
            steps = ", ".join(map(str, later))
            said.append(f"going on from step {self.start}; later checkpoints ({steps}) go as the run passes them")
        return said

    def _end(self, code: int) -> None:
        with suppress(LockLost):  # then the folder belongs to another process
            self.lock.check()
            self.store.remove_partial()
            self.folder.exported.remove_partial()
            self.events.write("end", exit_code=code)
            with suppress(OutOfSpace):  # the user knows; there may be room now that nothing partial is left
                self.metrics.flush()

    def _stopping(self, name: str) -> None:
        saving = "then saving" if self.config.checkpoint.save_on_exit else "without saving (checkpoint.save_on_exit)"
        what = f"finishing this step, {saving}" if self.is_training else "stopping before the first step"
        self.display.note(f"{name}: {what}; once more aborts at once")

    def _train(self, stop: StopRequest, logs: Path) -> int:
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(self.display)
            use_cache_without_network([config.model.path, *facts.named_models(config).values()])
            hooks = Hooks(
                while_starting=self._prepare,
                warn=self._warn,
                on_stuck=partial(leave, self.events),
            )
            with spared_while_importing():
                launcher = launcher_of(config, logs, stack, self.display.stage, hooks)
            stop.listen_again()
            run = self._build(logs, stack, launcher)
            self.trackers = trackers.load(
                config.logging.trackers,
                self.folder.path,
                project=config.logging.project,
                config=dict(flat(config)),
                first_step=self.start + 1 if self.checkpoint else 0,
            )
            stack.callback(self.trackers.close)
            stack.callback(stop.ignore)  # runs first when the stack closes
            loop = self._loop(run, stop)
            self.is_training = True
            spare_what_started()
            code = loop.run(self.start)
            self._flush_metrics()
            self._print_ending(code)
        return code

    def _prepare(self) -> None:
        """What takes seconds and needs no Ray."""
        from tqppo.run.build import make_ahead

        make_ahead(self.config, self.folder)

    def _build(self, logs: Path, stack: ExitStack, launcher: Launcher) -> LiveRun:
        from tqppo.run.build import build

        run = build(self.config, self.folder, logs, stack, self.display.stage, launcher=launcher, report=self._report)
        if self.checkpoint is not None:
            with self.display.stage(f"loading the checkpoint of step {self.start}"):
                run.load(self.checkpoint.folder, self.checkpoint.driver_state(), self.start)
            self._recall()
        self.store.remember_run_files()
        return run

    def _recall(self) -> None:
        """Take the run's history in, once everything has started: a start that fails changes no file of it."""
        for message in [*self.notes, *self.go_back()]:
            self._warn(message)
        if self.folder.metrics.exists():
            self.display.recall(metrics_files.read(self.folder.metrics))

    def _loop(self, run: LiveRun, stop: StopRequest) -> Loop:
        config = self.config
        background = BackgroundSave(self.store, _after_sync(self.metrics, run.begin_save), self.display.stage)
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
            store=self.store,
            log=self._log,
            validate=lambda: self._validate(run),
            measure=run.measure,
            leftovers=run.leftovers,
            save_parts=_after_sync(self.metrics, run.save),
            driver_state=run.driver_state,
            export=lambda: self._export(run),
            checkpoint_bytes=run.checkpoint_bytes,
            warn=self._warn,
            background=background if config.checkpoint.background else None,
        )

    def _validate(self, run: LiveRun) -> Metrics:
        metrics = run.validate()
        self.display.progress.example = run.validator.example
        if run.validator.example:
            self.events.write(EXAMPLE, text=run.validator.example)
        return metrics

    def _warn(self, message: str) -> None:
        self.display.note(message)
        self.events.write("warning", message=message)

    def _report(self, event: Event) -> None:
        """Write what a stage of the step reports; a notice is shown as well."""
        self.events.report(event)
        if event.notice:
            self.display.note(event.notice)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.lock.check()
        with self._goes_on(f"the metrics of step {step}", "wait for room on the disk"):
            self.metrics.write(step, metrics)
        with self._goes_on(f"the metrics of step {step}", "are not in every tracker"):
            self.trackers.log(step, metrics)
        self.display.step(step, metrics)
        for callback in self.callbacks:
            callback(step, dict(metrics))

    @contextmanager
    def _goes_on(self, what: str, consequence: str) -> Iterator[None]:
        """End the run if the disk is full, or warn and go on: `checkpoint.on_full_disk` decides."""
        try:
            yield
        except OutOfSpace as error:
            if self.config.checkpoint.on_full_disk == "stop":
                raise OutOfSpace(f"{what} were not written: {error}") from error
            self._warn(f"{what} {consequence}, training goes on: {error}")

    def _flush_metrics(self) -> None:
        try:
            self.metrics.flush()
        except OutOfSpace as error:
            raise OutOfSpace(f"the metrics of the last steps were not written: {error}") from error

    def _export(self, run: LiveRun) -> None:
        if not self.config.checkpoint.export:
            return
        with self.display.stage("exporting the model"):
            self.lock.check()
            self.folder.exported.remove_partial()
            try:
                run.export(self.folder.exported.partial)
                self.folder.exported.replace(max(self.start, self.config.run.max_steps))
            except OutOfSpace as error:
                again = f"; `tqppo resume {self.folder.name}` exports it once there is room"
                raise OutOfSpace(
                    f"the model was not exported: {error}{again if self.folder.is_saved else ''}"
                ) from error

    def _print_ending(self, code: int) -> None:
        folder, name = self.folder, self.folder.name
        steps = f"{self.display.progress.step} of {self.config.run.max_steps} steps"
        made = {"run": folder.path, "metrics": folder.metrics, "checkpoints": folder.checkpoints}
        places = {name: str(path) for name, path in made.items() if path.exists()}
        resume = f"tqppo resume {name}"
        is_saved = folder.is_saved
        if code:
            self.display.finish(
                Ending(f"stopped after {steps}", places, [(resume, "go on from here")] if is_saved else [])
            )
            return
        if self.config.checkpoint.export:
            places["model"] = str(folder.export)
        commands = [
            (f"tqppo eval {name}", "score it on held-out prompts"),
            (f"tqppo chat {name}", "talk to it"),
            (f"{resume} --max-steps {self.config.run.max_steps * 2}", "train longer"),
        ]
        self.display.finish(Ending(f"finished {steps}", places, commands if is_saved else []))
