"""`validate-config --probe`: loads what a config names, and reports what this machine lacks.

It loads the tokenizer and two dataset rows, scores them, compares the teachers' vocabularies, has each teacher score
two answers of the student, and looks for engines, devices and packages. Heavy imports happen inside functions.
"""

from __future__ import annotations

import asyncio
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
from tqppo.config.read.vocabulary import Vocabulary
from tqppo.engines.capabilities import capabilities_of
from tqppo.errors import TqppoError
from tqppo.space import SHARED_MEMORY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tqppo.config.compilation import Compilation
    from tqppo.data.prompts import Prompt

PACKAGES = {"transferqueue": "transfer_queue", "tensorboard": "tensorboard", "wandb": "wandb", "lora": "peft"}
HEALTH_TIMEOUT_S = 5.0


def probe(compilation: Compilation, tell: Callable[[str], None] = lambda finding: None) -> list[Diagnostic]:
    """All problems at once. They concern the machine, not the config, and give exit code 4.

    What is no problem and still worth knowing is told, such as how far the student is from its teachers.
    """
    config = compilation.draft
    context = Context(config, compilation.origins)
    found = [*_packages(context), *_engines(context), *_devices(context), *_shared_memory(context)]
    found += lacking(context, this_machine(Path(config.run.dir)))
    found += _attempt(context, "E611", "rollout.agent_args", partial(_agent, context))
    tokenizer, problems = _tokenizer(context, "model.tokenizer" if config.model.tokenizer else "model.path")
    found += problems
    if tokenizer is not None:
        found += [*_data(context, tokenizer), *_vocabularies(context, tokenizer)]
        if _has_teachers_here(context) and not any(each.severity == "error" for each in found):
            found += _teachers(context, tokenizer, tell)
    return in_order(found)


def _tokenizer(context: Context, key: str) -> tuple[PreTrainedTokenizerBase | None, list[Diagnostic]]:
    """The tokenizer of a model path, or None and a problem if it cannot be loaded."""
    path = context.value(key)
    if path == "tiny":
        from tqppo.tiny.model import byte_tokenizer

        return byte_tokenizer(), []
    from transformers import AutoConfig, AutoTokenizer

    trust = context.config.model.trust_remote_code
    try:
        if not key.endswith("tokenizer"):
            AutoConfig.from_pretrained(path, trust_remote_code=trust)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust), []
    except (OSError, ValueError) as error:
        why = str(error).strip().split("\n")[0]
        fix = "check the path; for a hub name, that this machine has network or the model in its cache"
        return None, [context.report("E601", f"{path} cannot be loaded: {why}", (key,), fix=fix)]


def _attempt(context: Context, code: str, key: str, attempt: Callable[[], Iterator[Diagnostic]]) -> list[Diagnostic]:
    """The problems that an attempt reports. A TqppoError becomes a problem of the key."""
    try:
        return list(attempt())
    except TqppoError as error:
        return [context.report(code, str(error), (key,))]


def _data(context: Context, tokenizer: PreTrainedTokenizerBase) -> list[Diagnostic]:
    from tqppo.data import prompts

    config = context.config
    spec = prompts.DataSpec.of(config.data)
    samples: list[Prompt] = []

    def rows() -> Iterator[Diagnostic]:
        loaded = prompts.load(spec, tokenizer, seed=config.run.seed)
        samples.extend(loaded.prompt(i) for i in range(min(2, len(loaded))))
        for each in samples:
            loaded.fit(each)
        yield from ()

    def held_out() -> Iterator[Diagnostic]:
        prompts.load(spec, tokenizer, seed=config.run.seed, held_out=True, sources=config.validation.data).first(2)
        yield from ()

    found = _attempt(context, "E602", "data.train", rows)
    if config.validation.data:
        found += _attempt(context, "E602", "validation.data", held_out)
    return found + _attempt(context, "E603", "reward.function", lambda: _rewards(context, samples))


def _rewards(context: Context, samples: list[Prompt]) -> Iterator[Diagnostic]:
    """Scores the reference answers. One that scores 0 points to a wrong answer column or a wrong function."""
    from tqppo.rewards.scorer import Scorer, ScorerSpec

    config = context.config
    scorer = Scorer(ScorerSpec.of(config.reward, max_new_tokens=config.rollout.max_new_tokens))
    try:
        for each in samples:
            reward = asyncio.run(scorer.score(each.source, str(each.answer), each.answer, each.extra))
            if reward.failure:
                yield context.report("E603", f"the reward function failed: {reward.failure}", ("reward.function",))
            elif reward.score <= 0:
                yield context.report(
                    "W604",
                    f"the reference answer of {each.uid} scores only {reward.score:g}, so no response can score well",
                    ("reward.function", "data.answer_key"),
                    found=f"answer {str(each.answer)[:60]!r} of source {each.source!r}",
                    fix="check reward.function and data.answer_key",
                )
    finally:
        scorer.close()


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

    return _attempt(context, "E611", f"teachers.{next(iter(context.config.teachers))}.path", trials)


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
            yield from _attempt(
                context, "E606", f"{section}.backend", partial(_interpreter, backend, python, needs_gpu)
            )


def _interpreter(backend: str, python: str, needs_gpu: bool) -> Iterator[Diagnostic]:
    from tqppo.engines.environments import python_of

    python_of(backend, python, on_gpu=needs_gpu)
    yield from ()


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

    here = torch.cuda.device_count()
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
