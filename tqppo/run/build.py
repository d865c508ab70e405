"""Builds a run's processes and stages from its config, and takes them down again in reverse order.

Imported only to train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tqppo.builtin import is_procedural
from tqppo.config import facts
from tqppo.config.plan.memory import weight_bytes
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, Demonstration, Prompt, Sampler, demonstrations, for_validation
from tqppo.data.prompts import load as load_prompts
from tqppo.devices.seats import Seat
from tqppo.errors import PreflightError
from tqppo.hub import use_cache_without_network
from tqppo.metrics.events import ReportEvent, unreported
from tqppo.processes import reaper
from tqppo.processes.hosting import Hosting, Launcher, failing_with
from tqppo.processes.in_order import AtOnce, Background, InOrder
from tqppo.processes.job import run_job
from tqppo.processes.nodes import num_nodes
from tqppo.queue.client import Queue
from tqppo.run import configure
from tqppo.run.compose import Processes, make_stages, make_trainer, validation_task
from tqppo.run.configure import RunPaths
from tqppo.run.folder import RunFolder
from tqppo.run.live import LiveRun, Validator
from tqppo.run.nodes import check_nodes
from tqppo.run.processes import LOADING, START_TIMEOUT_S, ProcessStarter, make_turns, seat_processes, start_groups
from tqppo.run.teachers import Announce, prepare_teachers
from tqppo.tiny.prepare import make_tiny_model
from tqppo.trainers.side_by_side import Clock
from tqppo.untrusted import loading
from tqppo.weights import location
from tqppo.workers.warm_start import warm_start

WARM_STEP_TIMEOUT_S = 600.0
QUICK_STEPS = 50  # of a warm start


def build(
    config: Config,
    folder: RunFolder,
    logs: Path,
    stack: ExitStack,
    announce: Announce,
    *,
    launcher: Launcher,
    report: ReportEvent = unreported,
) -> LiveRun:
    """Start everything and wait until it is ready; closing `stack` takes it down."""
    seating = seat_processes(config, stack, report)
    paths = prepare_paths(config, folder, logs, stack, announce, launcher=launcher, seat=seating.seats["actor"][0])
    if not config.cluster.in_process and num_nodes() > 1:
        with announce("comparing the nodes"):
            check_nodes(config, folder.config, paths.model)
    tokenizer = load_tokenizer(config, paths)
    queue = make_queue(config, stack)
    ahead = engines_in_order(config, stack)
    start = ProcessStarter(config, launcher, paths, queue, seating, make_turns(config), stack, report)
    groups = start_groups(config, paths, start.group, special_ids=special_tokens(config, tokenizer))
    estimator, teachers = start.estimator(), start.teachers(len(tokenizer))
    pool = start.pool(eos_tokens(tokenizer), announce)
    sampler = make_sampler(config, tokenizer, announce)
    clock = Clock()
    validator = Validator(pool, queue, clock, validation_prompts(config, tokenizer), validation_task(config))
    with announce(LOADING):
        start.groups_ready()
        estimator.ready(START_TIMEOUT_S)
    with announce(f"starting the {config.rollout.backend} engine"):
        start.pool_ready(pool)
    if teachers is not None:
        with announce(f"starting the teacher{'s' if len(config.teachers) > 1 else ''}"):
            start.teachers_ready(teachers)
        pool.use_teachers(teachers.routes())
    stages = make_stages(
        config,
        Processes(queue, groups, pool, estimator, ahead),
        sampler,
        clock,
        trajectories=trajectory_schedule(config, folder),
        vocabulary=len(tokenizer),
        report=report,
    )
    if ahead is not None:
        stack.callback(ahead.stop)  # before the engines are closed, whose calls then end
        stack.enter_context(failing_with(ahead.failure))
    trainer = make_trainer(config, stages)
    return LiveRun(queue, groups.actor, groups.critic, stages, clock, trainer, sampler, validator, teachers)


# -- the model ---------------------------------------------------------------------------------------------------------


def prepare_paths(
    config: Config,
    folder: RunFolder,
    logs: Path,
    stack: ExitStack,
    announce: Announce,
    *,
    launcher: Launcher,
    seat: Seat,
) -> RunPaths:
    """Find or make the models of the run; returns where everything is. `seat` is that of the actor's first rank."""
    with announce("making the model" if config.model.path == "tiny" else "finding the model"):
        model = prepare_model(config, folder.model)
    if facts.is_warmed(config):
        with announce(f"warming the model up: {config.warm_start.steps} supervised steps"):
            model = warmed_model(config, folder.model, launcher, seat)
    return RunPaths(
        model=model,
        tokenizer=config.model.tokenizer or model,
        logs=logs,
        publish=publish_folder(stack, model_bytes(config, model)),
        teachers=prepare_teachers(config, model, folder.scores, announce, launcher),
        scores=folder.scores,
    )


def make_ahead(config: Config, folder: RunFolder) -> None:
    """Make a tiny model that takes a second or two while Ray starts; `build` finds it made.

    One whose warm-up takes long is left to `build`, where a signal ends it. What fails here fails there again.
    """
    if config.warm_start.steps <= QUICK_STEPS:
        prepare_model(config, folder.model)


def prepare_model(config: Config, folder: Path) -> str:
    """The model's folder or hub name; a tiny model is made and warmed up here, where torch is imported already."""
    if config.model.path != "tiny":
        use_cache_without_network([config.model.path])
        return config.model.path
    return make_tiny_model(str(folder.resolve()), configure.tiny_model_spec(config), taught(config))


def taught(config: Config) -> Sequence[Demonstration]:
    """The demonstrations of the warm start: its own, or those of the training data."""
    data = replace(DataSpec.of(config.data), train=config.warm_start.data or config.data.train)
    return demonstrations(data, seed=config.run.seed)


def warmed_model(config: Config, folder: Path, launcher: Launcher, seat: Seat) -> str:
    """The model after supervised steps on its demonstrations: done by a process on the actor's device, which ends."""
    spec = configure.warm_start_spec(config, device=seat.compute_device)
    shown = taught(config)
    order = np.random.default_rng([config.run.seed, len(shown)]).permutation(len(shown))
    places = order[np.arange(spec.steps * spec.batch_size) % len(order)]
    work = partial(warm_start, spec, [shown[int(place)] for place in places], str(folder.resolve()))
    timeout_s = START_TIMEOUT_S + spec.steps * WARM_STEP_TIMEOUT_S
    return run_job(launcher, Hosting(seat), timeout_s, f"the warm start of {spec.steps} steps", work)


def load_tokenizer(config: Config, paths: RunPaths) -> Any:
    try:
        with loading(f"the tokenizer of {paths.tokenizer!r}"):
            return AutoTokenizer.from_pretrained(paths.tokenizer, trust_remote_code=config.model.trust_remote_code)
    except PreflightError as error:
        raise PreflightError(
            f"{error}\nmodel.path is a folder in Hugging Face's layout, a hub name (which needs the network), or tiny"
        ) from None


def special_tokens(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Special tokens, except those that end an answer."""
    endings = {*eos_tokens(tokenizer), *config.rollout.stop_token_ids}
    return tuple(sorted({int(token) for token in tokenizer.all_special_ids} - endings))


def eos_tokens(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def make_queue(config: Config, stack: ExitStack) -> Queue:
    storage = config.storage
    queue = Queue.create(
        storage.backend,
        budget_bytes=facts.storage_budget_bytes(config),
        timeout_s=storage.timeout_s,
        dir=storage.dir,
        local=config.cluster.in_process,
    )
    stack.callback(queue.close)
    return queue


def engines_in_order(config: Config, stack: ExitStack) -> InOrder | None:
    """What does the engines' work in front of training; closing `stack` waits for it once the engines are closed."""
    if not config.rollout.ahead:
        return None
    ahead: InOrder = AtOnce() if config.cluster.in_process else Background("generation-ahead")
    stack.callback(ahead.join)
    stack.callback(ahead.stop)  # once more, if the build fails before it is called
    return ahead


def model_bytes(config: Config, model: str) -> int:
    """The size of one published version: by the model's shape, or else by its files; 0 if neither is known."""
    shape = facts.model_shape(config)
    if shape is not None:
        return weight_bytes(shape, facts.compute_dtype(config))
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def publish_folder(stack: ExitStack, num_bytes: int = 0) -> str:
    """Where the actor publishes weights of this size; the folders of dead runs are removed first."""
    location.remove_abandoned()
    folder = location.new_folder(num_bytes)
    stack.callback(reaper.remove, folder)
    return str(folder)


def trajectory_schedule(config: Config, folder: RunFolder) -> Callable[[int], Path | None]:
    every = config.logging.trajectories
    return lambda step: folder.trajectories / f"step_{step:06d}.jsonl" if every and step % every == 0 else None


def make_sampler(config: Config, tokenizer: Any, announce: Announce) -> Sampler:
    """The training prompts. Files are read through once, so that an overlong prompt is found now, not at step 700."""
    prompts = load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed)
    if config.data.overlong == "error" and not all(is_procedural(each) for each in facts.data_sources(config)):
        with announce("checking the prompts"):
            prompts.check()
    return Sampler(prompts)


# -- validation --------------------------------------------------------------------------------------------------------


def validation_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    data, sources = DataSpec.of(config.data), config.validation.data
    held_out = for_validation(data, tokenizer, seed=config.run.seed, sources=sources)
    return held_out.first(config.validation.num_prompts) if held_out else []
