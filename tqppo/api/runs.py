"""Training and looking at runs from Python: `tqppo.train`, `tqppo.Run`, `tqppo.evaluate`, `tqppo.load_model`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqppo.api.rewards import RewardLike, put_back, reward_names
from tqppo.api.table import MetricsTable
from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic, render_text
from tqppo.config.values import toml_value
from tqppo.errors import ConfigError, PreflightError, TrainingAborted, UsageError
from tqppo.metrics import files as metrics_files
from tqppo.run import start
from tqppo.run.attempt import Callback
from tqppo.run.checkpoint import find_run
from tqppo.run.folder import RunFolder, refuse_taken_name, runs_folder
from tqppo.run.summary import RunSummary, summarise

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tqppo.doctor.evaluate import Evaluation

Overriding = Mapping[str, object] | Sequence[str]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """A run on disk. Nothing is cached: a run that another process trains shows its progress."""

    folder: Path

    @classmethod
    def open(cls, name: str | Path, runs: str | Path | None = None) -> Run:
        """A run by its name, its folder, or `latest`."""
        return cls(find_run(str(name), Path(runs) if runs else runs_folder())[0])

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model_path(self) -> Path | None:
        """The exported model, a folder that `transformers` loads; None before the run's end."""
        export = RunFolder(self.folder).export
        return export if export.is_dir() else None

    @property
    def best_checkpoint(self) -> Path | None:
        """The saved checkpoint with the best score so far; the newest one if none was scored."""
        saved = {int(path.name.rpartition("_")[2]): path for path in self.folder.glob("checkpoints/step_*")}
        if not saved:
            return None
        name = self.summary().score_name
        scores = {int(row["step"] or 0): row.get(name) for row in self.metrics()} if name else {}
        scored = {step: score for step in saved if (score := scores.get(step)) is not None}
        return saved[max(scored, key=lambda step: (scored[step], step)) if scored else max(saved)]

    def metrics(self) -> MetricsTable:
        path = RunFolder(self.folder).metrics
        return MetricsTable(metrics_files.read(path) if path.is_file() else [])

    def summary(self) -> RunSummary:
        """State, steps, scores, age and size."""
        return summarise(RunFolder(self.folder))

    def resume(
        self,
        *,
        max_steps: int | None = None,
        overrides: Overriding = (),
        callbacks: Sequence[Callback] = (),
        reward: RewardLike | Sequence[RewardLike] | None = None,
        quiet: bool = False,
    ) -> Run:
        """Go on from the newest checkpoint. A reward that was an object is given again if its file is gone."""
        if reward is not None:
            named = _compiled(RunFolder(self.folder).config, None, ()).draft.reward.function
            put_back([named] if isinstance(named, str) else named, reward)
        code = start.resume(
            str(self.folder),
            settings_of(overrides),
            max_steps=max_steps,
            verbosity=-1 if quiet else 0,
            callbacks=callbacks,
        )
        _check(code, self.folder)
        return self

    def evaluate(self, **options: object) -> Evaluation:
        """Scores on held-out prompts; the options are those of `tqppo.evaluate`."""
        return evaluate(str(self.folder), **options)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        found = self.summary()
        score = "" if found.last_score is None else f", {found.score_name} {found.last_score:.3f}"
        return f"<Run {self.name}: {found.state}, {found.steps} of {found.max_steps} steps{score}>"


def train(
    config: str | Path | Compilation,
    *,
    reward: RewardLike | Sequence[RewardLike] | None = None,
    overrides: Overriding = (),
    callbacks: Sequence[Callback] = (),
    overwrite: bool = False,
    probe: bool = True,
    quiet: bool = False,
) -> Run:
    """Train with a preset, a TOML file or a compiled config, and return the run.

    `reward` is a name as in the config, a function or another callable, or several. `overrides` are settings, as
    `{"actor.lr": 1e-3}` or as `--set` has them. Each callback is called with the step and its metrics. Mistakes are
    raised as TqppoErrors.
    """
    if isinstance(config, Compilation) and (reward is not None or overrides):
        raise UsageError("a compiled config cannot be changed: give overrides and reward.function to compile_config")
    compilation = config if isinstance(config, Compilation) else _compiled(config, reward, overrides)
    if compilation.config is None:
        raise ConfigError(render_text(compilation.diagnostics))
    refuse_taken_name(Path(compilation.config.run.dir), compilation.config.run.name, overwrite=overwrite)
    if probe:
        _probe(compilation)
    found: list[Path] = []
    code = start.train(
        compilation,
        verbosity=-1 if quiet else 0,
        overwrite=overwrite,
        callbacks=callbacks,
        on_folder=found.append,
    )
    _check(code, found[0])
    return Run(found[0])


def resume(
    name: str | Path,
    *,
    max_steps: int | None = None,
    overrides: Overriding = (),
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Run:
    """Go on with a run where its newest checkpoint left off."""
    return Run.open(name).resume(max_steps=max_steps, overrides=overrides, callbacks=callbacks, quiet=quiet)


def evaluate(
    model: str | Path,
    *,
    data: str | Sequence[str] = "",
    num_prompts: int = 0,
    samples: int = 0,
    overrides: Overriding = (),
) -> Evaluation:
    """Answer prompts with a run's model, or any other, and score the answers; as `tqppo eval` does."""
    from tqppo.doctor.evaluate import evaluate_model

    given = settings_of(overrides)
    return outside_of_event_loops(
        lambda: evaluate_model(str(model), data=data, num_prompts=num_prompts, samples=samples, overrides=given)
    )


def load_model(name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a run (its newest weights) or of a folder, and its tokenizer, loaded with `transformers`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tqppo.doctor.models import opened

    with opened(str(name)) as model:
        tokenizer = AutoTokenizer.from_pretrained(model.config.model.tokenizer or model.path)
        return AutoModelForCausalLM.from_pretrained(model.path), tokenizer


def settings_of(overrides: Overriding) -> list[str]:
    """`{"actor.lr": 1e-3}` as `--set` writes it; `["actor.lr=1e-3"]` unchanged."""
    if isinstance(overrides, Mapping):
        return [f"{key}={toml_value(value)}" for key, value in overrides.items()]
    return list(overrides)


def outside_of_event_loops(function: Callable[[], Value]) -> Value:
    """Call a function that runs an event loop of its own: in another thread if this one has a loop, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _compiled(
    config: str | Path, reward: RewardLike | Sequence[RewardLike] | None, overrides: Overriding
) -> Compilation:
    is_file = isinstance(config, Path) or str(config).endswith(".toml")
    given = settings_of(overrides)
    preset, files = (None, [config]) if is_file else (str(config), [])
    if reward is None:
        return compile_config(preset, files, given)
    runs = compile_config(preset, files, given).draft.run.dir
    names = reward_names(reward, Path(runs))
    written = json.dumps(names[0] if len(names) == 1 else names)
    return compile_config(preset, files, [*given, f"reward.function={written}"])


def _probe(compilation: Compilation) -> None:
    from tqppo.doctor.probe import probe

    found: list[Diagnostic] = outside_of_event_loops(lambda: probe(compilation, starts_engines=False))
    if any(each.severity == "error" for each in found):
        raise PreflightError(render_text(found))


def _check(code: int, folder: Path) -> None:
    if code in (130, 143):
        raise KeyboardInterrupt(f"stopped; the run is in {folder}, and Run.resume goes on with it")
    if code:
        raise TrainingAborted(f"the run in {folder} ended with exit code {code}; its logs are in {folder}/logs/latest")
