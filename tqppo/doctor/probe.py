"""Loads what a config names, and reports what this machine lacks: `validate-config --probe`, and `train` at its start.

It loads the tokenizer, measures dataset rows, scores two of them, looks for the LoRA targets in the model, compares the
teachers' vocabularies, and looks for engines, devices and packages. `validate-config --probe` also has each teacher
score two answers of the student. Heavy imports happen inside functions.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tqppo.config.checks import vocabulary
from tqppo.config.checks.machine import lacking
from tqppo.config.checks.registry import Context
from tqppo.config.diagnostics import Diagnostic, in_order
from tqppo.config.facts import has_teachers, named_models
from tqppo.config.plan.machine import this_machine
from tqppo.config.read.nearest import did_you_mean
from tqppo.config.read.vocabulary import Vocabulary
from tqppo.devices.fake_gpus import fake_gpus
from tqppo.engines.capabilities import capabilities_of
from tqppo.errors import DataError, PreflightError, TqppoError
from tqppo.hub import use_cache_without_network
from tqppo.space import SHARED_MEMORY
from tqppo.untrusted import loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tqppo.config.compilation import Compilation
    from tqppo.data.prompts import Prompt

PACKAGES = {"transferqueue": "transfer_queue", "tensorboard": "tensorboard", "wandb": "wandb", "lora": "peft"}
HEALTH_TIMEOUT_S = 5.0
MEASURED_ROWS = 256
SCORED_ROWS = 2
SHOWN_CHARACTERS = 160


def probe(
    compilation: Compilation, tell: Callable[[str], None] = lambda finding: None, *, starts_engines: bool = True
) -> list[Diagnostic]:
    """All problems at once. They concern the machine, not the config, and give exit code 4.

    Reports what it saw: rows and their lengths, the first prompt, the reward of its reference answer, and how far the
    student is from its teachers. Without `starts_engines` the teachers are not tried: a run does that itself.
    """
    config = compilation.draft
    context = Context(config, compilation.origins)
    found = [*_packages(context), *_engines(context), *_devices(context), *_shared_memory(context)]
    found += lacking(context, this_machine(Path(config.run.dir)))
    tried = "`tqppo agent try` plays one session"
    found += _attempt(context, "E611", "rollout.agent_args", partial(_agent, context), fix=tried)
    tokenizer, problems = _tokenizer(context, "model.tokenizer" if config.model.tokenizer else "model.path")
    found += problems
    if tokenizer is not None:
        tell(f"tokenizer  {config.model.tokenizer or config.model.path}: {len(tokenizer)} tokens")
        found += [*_lora(context), *_data(context, tokenizer, tell), *_vocabularies(context, tokenizer)]
        if starts_engines and _has_teachers_here(context) and not any(each.severity == "error" for each in found):
            found += _teachers(context, tokenizer, tell)
    return in_order(found)


def _tokenizer(context: Context, key: str) -> tuple[PreTrainedTokenizerBase | None, list[Diagnostic]]:
    """The tokenizer of a model path, or None and a problem if it cannot be loaded."""
    path = context.value(key)
    if path == "tiny":
        from tqppo.tiny.tokenizer import byte_tokenizer

        return byte_tokenizer(), []
    use_cache_without_network([str(path)])
    from transformers import AutoConfig, AutoTokenizer

    trust = context.config.model.trust_remote_code
    try:
        with loading(str(path)):
            if not key.endswith("tokenizer"):
                AutoConfig.from_pretrained(path, trust_remote_code=trust)
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust), []
    except PreflightError as error:
        fix = "check the path; for a hub name, that this machine has network or the model in its cache"
        return None, [context.report("E601", str(error), (key,), fix=fix)]


def _attempt(
    context: Context, code: str, key: str, attempt: Callable[[], Iterator[Diagnostic]], *, fix: str
) -> list[Diagnostic]:
    """The problems that an attempt reports. A TqppoError becomes a problem of the key."""
    try:
        return list(attempt())
    except TqppoError as error:
        return [context.report(code, str(error), (key,), fix=fix)]


def _data(context: Context, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None]) -> list[Diagnostic]:
    from tqppo.data import prompts

    config = context.config
    spec = prompts.DataSpec.of(config.data)
    samples: list[Prompt] = []

    def rows() -> Iterator[Diagnostic]:
        loaded = prompts.load(spec, tokenizer, seed=config.run.seed)
        measured = loaded.prompts([(0, index) for index in range(min(MEASURED_ROWS, len(loaded)))])
        samples.extend(measured[:SCORED_ROWS])
        for each in measured:
            loaded.fit(each)
        lengths = [len(each.tokens) for each in measured]
        tell(f"data       {len(loaded)} rows, prompts of {min(lengths)} to {max(lengths)} tokens")
        tell(f"prompt     {_brief(measured[0].text)}, with the answer {_brief(str(measured[0].answer))}")
        yield from _batch(context, len(loaded))

    def held_out() -> Iterator[Diagnostic]:
        prompts.load(spec, tokenizer, seed=config.run.seed, held_out=True, sources=config.validation.data).first(2)
        yield from ()

    def shown() -> Iterator[Diagnostic]:
        rows = spec.rows(seed=config.run.seed, sources=config.warm_start.data)
        if rows.row(0).answer is None:
            raise DataError(
                f"{rows.where(0)}: a demonstration needs an answer: a column, or the assistant's last message"
            )
        tell(f"warm start {config.warm_start.steps} steps on {len(rows)} demonstrations")
        yield from ()

    attempts = {"data.train": rows}
    attempts |= {"warm_start.data": shown} if config.warm_start.data else {}
    attempts |= {"validation.data": held_out} if config.validation.data else {}
    found: list[Diagnostic] = []
    for key, attempt in attempts.items():
        look = f"look at its rows: tqppo data show {_written(context.value(key))}"
        found += _attempt(context, "E602", key, attempt, fix=look)
    return found + _attempt(
        context, "E603", "reward.function", lambda: _rewards(context, samples, tell), fix=_reward_command(context)
    )


def _written(names: object) -> str:
    """The first of the names that a setting holds, for a command line."""
    first = str(next(iter(names), "") if isinstance(names, list) else names)
    return shlex.quote(os.path.relpath(first) if os.path.isabs(first) and Path(first).exists() else first)


def _reward_command(context: Context) -> str:
    function = str(context.value("reward.function") or "task")
    place, colon, name = function.rpartition(":")
    shown = f"{os.path.relpath(place)}:{name}" if colon and os.path.isabs(place) else function
    data = _written(context.value("data.train"))
    return f"correct it, then try it: tqppo reward try {shlex.quote(shown)} --data {data}"


def _brief(text: str) -> str:
    """A text on one line, without its middle if it is long."""
    shown = repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:80]} … {shown[80 - SHOWN_CHARACTERS :]}"


def _batch(context: Context, num_rows: int) -> Iterator[Diagnostic]:
    batch_size = context.config.data.batch_size
    if batch_size > num_rows:
        yield context.report(
            "W621",
            f"a batch has {batch_size} prompts, and the data has {num_rows} rows: each step trains on the same ones",
            ("data.batch_size", "data.train"),
            allowed=f"at most {num_rows}",
            fix=f"set data.batch_size = {num_rows}, or add data",
        )


def _rewards(context: Context, samples: list[Prompt], tell: Callable[[str], None]) -> Iterator[Diagnostic]:
    """Scores the reference answers. One that scores 0 points to a wrong answer column or a wrong function."""
    from tqppo.doctor.rewards import try_reward
    from tqppo.rewards.functions import REFERENCE_IS_NO_ANSWER
    from tqppo.rewards.scorer import ScorerSpec

    config = context.config
    named = config.reward.function
    is_answer = REFERENCE_IS_NO_ANSWER.isdisjoint([named] if isinstance(named, str) else named)
    spec = ScorerSpec.of(
        config.reward.model_copy(update={"on_error": "zero"}), max_new_tokens=config.rollout.max_new_tokens
    )
    for each, sample in zip(try_reward(spec, [(s.uid, s) for s in samples], references=True), samples, strict=True):
        if each.failure:
            code = "E603" if config.reward.on_error == "error" else "W604"
            fix = _reward_command(context)
            yield context.report(code, f"the reward function failed: {each.failure}", ("reward.function",), fix=fix)
            continue
        if sample is samples[0]:
            what = "the reference answer" if is_answer else "the reference in place of an answer"
            tell(f"reward     {each.score:g} for {what}, in {1000 * each.seconds:.1f} ms")
        if each.score <= 0 and sample.answer is not None and is_answer:
            yield context.report(
                "W604",
                f"the reference answer of {each.where} scores only {each.score:g}, so no response can score well",
                ("reward.function", "data.answer_key"),
                found=f"answer {each.answer[:60]!r} of source {sample.source!r}",
                fix="check reward.function and data.answer_key",
            )


def _lora(context: Context) -> Iterator[Diagnostic]:
    """Looks for the modules that get an adapter in the model, built without its weights."""
    model = context.config.model
    if not model.lora_rank or model.lora_targets == ["all-linear"]:
        return
    names = _modules(context)
    for each in model.lora_targets:
        if not any(name == each or name.endswith(f".{each}") for name in names):
            linear = sorted({name.rpartition(".")[2] for name in names})
            yield context.report(
                "E622",
                f'{model.path} has no linear module called "{each}"',
                ("model.lora_targets", "model.path"),
                found=f'"{each}"',
                allowed=", ".join(linear),
                fix=did_you_mean(each, linear) or 'set model.lora_targets = ["all-linear"]',
            )


def _modules(context: Context) -> list[str]:
    """The names of the model's linear modules."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tqppo.tiny.model import tiny_config

    model = context.config.model
    if model.path == "tiny":
        own = tiny_config(
            family=model.family,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            tie_embeddings=model.tie_embeddings,
        )
    else:
        own = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    make: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_config
    with loading(f"model {model.path!r}"), torch.device("meta"):
        built = make(own, trust_remote_code=model.trust_remote_code)
    return [name for name, module in built.named_modules() if isinstance(module, torch.nn.Linear)]


def _agent(context: Context) -> Iterator[Diagnostic]:
    """Imports the agent loop, and has it check its arguments: tools are imported in a process of their own."""
    from tqppo.rollout.loops.base import check_loop

    rollout = context.config.rollout
    check_loop(rollout.agent, rollout.agent_args)
    yield from ()


def _vocabularies(context: Context, tokenizer: PreTrainedTokenizerBase) -> Iterator[Diagnostic]:
    """Compares each teacher's tokenizer with the student's. Teachers that tqppo makes have the student's own."""
    config = context.config
    for name in named_models(config) if has_teachers(config) else ():
        other, problems = _tokenizer(context, f"teachers.{name}.path")
        yield from problems
        if other is not None and config.distillation.check_vocabulary:
            yield from vocabulary.compare(context, name, _vocabulary(tokenizer), _vocabulary(other), code="E605")


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return Vocabulary(tokenizer.get_vocab(), frozenset(special), str(tokenizer.eos_token or ""))


def _has_teachers_here(context: Context) -> bool:
    """Whether the engines of student and teachers can be started by this process: a cluster has its own devices."""
    config = context.config
    teachers = config.teachers.values() if has_teachers(config) else ()
    attaches = bool(config.rollout.endpoints) and all(teacher.endpoints for teacher in teachers)
    return bool(teachers) and (attaches or not config.cluster.address)


def _teachers(context: Context, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None]) -> list[Diagnostic]:
    from tqppo.doctor.teachers import try_teachers

    def trials() -> Iterator[Diagnostic]:
        for trial in try_teachers(context.config, tokenizer):
            tell(str(trial))
        yield from ()

    key = f"teachers.{next(iter(context.config.teachers))}.path"
    return _attempt(context, "E611", key, trials, fix="correct the settings of [teachers], or start its server")


def _engines(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    rollout, on_gpu = config.rollout, config.cluster.gpus_per_node > 0
    wanted = [("rollout", rollout.backend, rollout.python, rollout.endpoints, on_gpu)]
    for name, t in config.teachers.items() if has_teachers(config) else ():
        on_gpu = config.distillation.gpus_per_node > 0
        wanted.append((f"teachers.{name}", t.backend, t.python, t.endpoints, on_gpu))
    for section, backend, python, endpoints, needs_gpu in wanted:
        able = capabilities_of(backend)
        if endpoints:
            yield from _servers(context, section, endpoints)
        elif able is not None and able.needs_environment:
            yield from _interpreter(context, section, backend, python, needs_gpu)


def _interpreter(context: Context, section: str, backend: str, python: str, needs_gpu: bool) -> Iterator[Diagnostic]:
    from tqppo.engines.environments import python_of

    try:
        python_of(backend, python, on_gpu=needs_gpu)
    except TqppoError as error:
        message, _, advice = str(error).partition(". ")
        yield context.report("E606", message, (f"{section}.python" if python else f"{section}.backend",), fix=advice)


def _servers(context: Context, section: str, endpoints: list[str]) -> Iterator[Diagnostic]:
    import urllib.error
    import urllib.request

    for each in endpoints:
        problem = ""
        try:
            urllib.request.urlopen(f"{each.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            problem = f"answers {error.code}"
        except (OSError, ValueError) as error:
            problem = f"does not answer: {error}"
        if problem:
            fix = "start the server, or correct the address"
            yield context.report("E606", f"the server {each} {problem}", (f"{section}.endpoints",), fix=fix)


def _devices(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    if config.cluster.address or not config.cluster.gpus_per_node:
        return  # the devices of a cluster are counted when the run joins it
    import torch

    fake = fake_gpus()
    here = fake.count if fake else torch.cuda.device_count()
    if here < config.cluster.gpus_per_node:
        yield context.report(
            "E607",
            f"this machine has {here} GPUs",
            ("cluster.gpus_per_node",),
            allowed=f"at most {here} on this machine",
            fix='set cluster.gpus_per_node = 0 for CPUs, or cluster.address = "auto" for a Ray cluster',
        )


def _packages(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    wanted: list[tuple[str, str]] = [(each, "logging.trackers") for each in config.logging.trackers]
    wanted += [("transferqueue", "storage.backend")] if config.storage.backend == "transferqueue" else []
    wanted += [("lora", "model.lora_rank")] if config.model.lora_rank else []
    for extra, key in wanted:
        if find_spec(PACKAGES[extra]) is None:
            message = f"the package {PACKAGES[extra]} is not installed"
            yield context.report("E608", message, (key,), fix=f"pip install 'tqppo[{extra}]'")


def _shared_memory(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    folder = config.storage.dir or SHARED_MEMORY
    try:
        free = shutil.disk_usage(folder).free / 2**30
    except OSError:
        if config.storage.dir:
            yield context.report("E609", f"there is no folder {folder}", ("storage.dir",), fix="make it, or delete it")
        return
    if config.storage.backend == "simple" and free < config.storage.budget_gb:
        yield context.report(
            "W610",
            f"{folder} has {free:.1f} GiB free, and the storage's budget is {config.storage.budget_gb:g} GiB",
            ("storage.budget_gb",),
            fix=f"set storage.budget_gb = {max(0.1, free * 0.8):.1f}, or storage.dir to a folder with more room",
        )
