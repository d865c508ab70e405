"""Opens what `eval`, `chat`, `sample` and `export` are given: a run, one of its checkpoints, or a model."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqppo import space
from tqppo.config import facts
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.sections import Config
from tqppo.errors import CheckpointError, ConfigError, UsageError
from tqppo.hub import use_cache_without_network
from tqppo.run.checkpoint import Checkpoint, CheckpointStore, find_run
from tqppo.run.folder import RunFolder, runs_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that an engine can load, and the settings to use it with: the run's, or defaults."""

    config: Config
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class SavedActor:
    """A checkpoint's actor, and what is needed to make a model of it."""

    config: Config
    run: RunFolder
    checkpoint: Checkpoint

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder / "actor"

    def export(self, to: Path, *, adapter: bool = False, dtype: str = "float32") -> None:
        """Write a Hugging Face folder; with `adapter`, the LoRA adapter alone. One that fails leaves no half of it."""
        to = to.absolute()
        partial = to.with_name(f".partial-{to.name}-{secrets.token_hex(4)}")
        try:
            self._write(partial, adapter=adapter, dtype=dtype)
            space.sync_tree(partial)
            to.mkdir(exist_ok=True)
            for path in partial.iterdir():
                path.rename(to / path.name)
            partial.rmdir()
        except BaseException:  # a signal, too
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _write(self, to: Path, *, adapter: bool, dtype: str) -> None:
        from tqppo.run import configure
        from tqppo.workers.export import export_adapter, export_checkpoint

        model = str(self.run.model) if facts.makes_model(self.config) else self.config.model.path
        spec = configure.model_spec(self.config, model, lora=True)
        if adapter:
            export_adapter(spec, self.folder, to, seed=self.config.run.seed)
            return
        export_checkpoint(spec, self.folder, to, dtype=dtype, seed=self.config.run.seed)


@contextmanager
def opened(name: str, overrides: Sequence[str] = ()) -> Iterator[OpenedModel]:
    """The newest weights of a run, those of a checkpoint, or a folder or hub name that `transformers` loads."""
    if is_model(name):
        settings = _compiled([], [f"model.path={name}", *overrides])
        use_cache_without_network([name])
        yield OpenedModel(settings, name, name)
        return
    try:
        saved = saved_actor(name, overrides)
    except UsageError as error:
        raise UsageError(f"{error}. A model is a folder with config.json, or a hub name such as org/name") from None
    run = saved.run
    if run.exported.step == saved.checkpoint.step:
        yield OpenedModel(saved.config, str(run.export), f"{run.name}, step {saved.checkpoint.step}")
        return
    with tempfile.TemporaryDirectory(prefix="tqppo-model-") as folder:
        saved.export(Path(folder))
        yield OpenedModel(saved.config, folder, f"{run.name}, step {saved.checkpoint.step}")


def is_model(name: str) -> bool:
    """Whether this is a model and no run: a folder with a model's config, or a hub name that no run has."""
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path / "config.json"):
        return True
    return "/" in name and not os.path.exists(path) and not os.path.exists(runs_folder() / name)


def saved_actor(name: str, overrides: Sequence[str] = ()) -> SavedActor:
    """A run's newest checkpoint, or the checkpoint that `name` is."""
    try:
        path, wanted = find_run(name, runs_folder())
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    run = RunFolder(path)
    store = CheckpointStore(run.checkpoints, run_files=run.files_of_resume)
    checkpoint = store.open(wanted) if wanted is not None else store.newest(log.warning)
    return SavedActor(_compiled([run.config], overrides), run, checkpoint)


def _compiled(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    compilation = compile_config(None, files, overrides, environ={})
    if compilation.config is None:
        raise ConfigError(render_text(compilation.diagnostics))
    return compilation.config
