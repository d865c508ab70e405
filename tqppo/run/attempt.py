"""One start of a run: build everything, train, take everything down. `start` calls it for a new or a resumed run."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqppo.config.sections import Config
from tqppo.config.show.export import flat
from tqppo.display.display import Display, Ending
from tqppo.metrics import files as metrics_files
from tqppo.metrics import trackers
from tqppo.metrics.events import Event
from tqppo.metrics.files import EventLog, MetricsLog
from tqppo.run.checkpoint import Checkpoint, CheckpointStore
from tqppo.run.cluster import ray_cluster
from tqppo.run.folder import RunFolder
from tqppo.run.loop import Loop, Schedule
from tqppo.run.signals import Aborted, StopRequest

if TYPE_CHECKING:
    from tqppo.run.live import LiveRun


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

        run = build(self.config, self.folder, logs, stack, self.display.stage, report=self._report)
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

    def _report(self, event: Event) -> None:
        """Write what a stage of the step reports; a notice is shown as well."""
        self.events.report(event)
        if event.notice:
            self.display.note(event.notice)

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
