"""What distillation saves: updates and CPU-seconds to the score of a GRPO run, from the same initial weights.

    make bench-distill
    python tests/bench/distill.py [--parts learning overlap wire] [--seeds 41 42 …] [--methods top-k …]

`learning`: GRPO trains a tiny model to its score s and is the teacher from then on. Each method starts from GRPO's
initial weights and trains until its held-out, sampled accuracy is 0.95 s. All roles run in this process, as with
`tqppo train --in-process`; CPU-seconds are those of the steps, teachers included, without start-up and validation.
`ray`: CPU-seconds of a step with each role in a process of its own. `overlap`: a step with scoring streamed, after
generation and without. `wire`: bytes of vLLM's and SGLang's answers per scored token, as JSON and as arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "140")  # of a terminal that does not say: the table is wider than the usual 80

import score
import torch
from harness import OUTPUT, cpu_seconds, interleaved, show
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec, Demonstration, demonstrations
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.run.build import build
from tqppo.run.cluster import ray_cluster
from tqppo.run.folder import new_run
from tqppo.run.live import LiveRun
from tqppo.tiny import warm_start
from tqppo.tiny.model import TinyShape
from tqppo.tiny.tokenizer import byte_tokenizer

SEEDS = (41, 42, 43, 44, 45)  # not used to choose a setting
SCORE = "val-core/sort/acc/mean@1"
SHARE = 0.95  # of GRPO's score
FEWER_UPDATES, FEWER_CPU_S = 7.0, 3.0  # wanted, as factors
PRIVILEGED = "{prompt}\nReference: {answer}"
SHAPE: TinyShape = {"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": True}
WARM_STEPS, PLAIN_SHARE = 100, 20  # one demonstration in so many has no reference, so that sorting is left to learn
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Method:
    """How to learn, and for how long at most. `rows` are sampled a step, and each update has `update_rows`."""

    settings: tuple[str, ...]
    lr: float
    rows: int
    update_rows: int
    max_steps: int
    validate_every: int
    preset: str = "base-tiny"
    teacher: str = "grpo"  # or `student`: the initial weights, with a prompt that holds the answer

    @property
    def updates_per_step(self) -> int:
        return self.rows // self.update_rows

    @property
    def description(self) -> str:
        return f"lr {self.lr:g}, {self.rows} rows a step in {self.updates_per_step} updates"


def distilling(loss: str, update: str, lr: float, *, max_steps: int = 120, teacher: str = "grpo") -> Method:
    settings = (f"distillation.loss={loss}", f"distillation.update={update}", "distillation.top_k=32")
    return Method(settings, lr, 256, 256, max_steps, 1, teacher=teacher)


METHODS = {
    "grpo": Method((), 1e-3, 256, 128, 400, 10, preset="quickstart"),
    "sampled": distilling("k1", "policy_gradient", 1e-3, max_steps=240),
    "top-k": distilling("forward_kl_topk", "supervised", 2e-3),
    "full": distilling("forward_kl", "supervised", 2e-3),
    "self": distilling("forward_kl_topk", "supervised", 2e-3, teacher="student"),
    "sft": Method((), 2e-3, 256, 256, 240, 1),
}
MEANING = {
    "grpo": "the quickstart preset from these weights",
    "sampled": "teacher's log-probability of the sampled token, k1, policy gradient",
    "top-k": "teacher's 32 likeliest tokens, forward KL",
    "full": "whole vocabulary by hidden states, forward KL",
    "self": "the initial weights with the answer in their prompt, top-32, forward KL",
    "sft": "cross-entropy on the teacher's own answers, a bare loop in one process",
}


@dataclass
class Curve:
    """Held-out accuracy over a run, and what it cost until then."""

    updates: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, updates: int, cpu_s: float, found: float) -> None:
        self.updates.append(updates)
        self.cpu_s.append(cpu_s)
        self.scores.append(found)

    def reached(self, target: float) -> int | None:
        """The place of the first validation with this score."""
        return next((place for place, found in enumerate(self.scores) if found >= target), None)


# -- the initial weights -----------------------------------------------------------------------------------------------


def with_reference(example: Demonstration) -> Demonstration:
    """The demonstration as a self-teacher's prompt has it."""
    messages, answer = example
    *before, last = messages
    asked = PRIVILEGED.format(prompt=last["content"], answer=answer)
    return [*before, {**last, "content": asked}], answer


def initial_weights(seed: int, folder: Path) -> Path:
    """A model that copies a reference and hardly sorts, so that one start serves every method."""
    plain = demonstrations(DataSpec.of(compiled("base-tiny").data), seed=seed)
    shown = [each if i % PLAIN_SHARE == 0 else with_reference(each) for i, each in enumerate(plain)]
    return warm_start.prepare(folder, model=SHAPE, demonstrations=shown, steps=WARM_STEPS, seed=seed)


# -- runs of tqppo -----------------------------------------------------------------------------------------------------


def compiled(preset: str, *settings: str) -> Config:
    compilation = compile_config(preset, overrides=list(settings), environ={})
    assert compilation.config is not None, compilation.diagnostics
    return compilation.config


def config_of(method: Method, seed: int, start: Path, teacher: Path | None) -> Config:
    settings = [f'model.path="{start}"', f"run.seed={seed}", f"actor.lr={method.lr}", *method.settings]
    if teacher is not None:
        settings += ["mode=distill", f"data.batch_size={method.rows}", "rollout.group_size=1"]
        settings += ["actor.schedule=constant", f"actor.mini_batch_size={method.update_rows}"]
        path, prompt = ("student", PRIVILEGED) if method.teacher == "student" else (str(teacher), "")
        settings += [f'teachers.one.path="{path}"', f"teachers.one.prompt={toml_string(prompt)}"]
    return compiled(method.preset, *settings)


def toml_string(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


@contextmanager
def live(config: Config, scratch: Path, name: str) -> Iterator[LiveRun]:
    """The parts of a run, built as `tqppo train` builds them."""
    with ExitStack() as stack:
        folder = new_run(scratch / "runs", name, preset="", model="")
        yield build(
            config,
            folder,
            folder.next_attempt(),
            stack,
            lambda text: nullcontext(lambda line: None),
            launcher=RayLauncher(),
        )


def train(run: LiveRun, method: Method, target: float | None) -> Curve:
    """Train until the target, or to the end without one."""
    curve, cpu_s = Curve(), 0.0
    curve.add(0, 0.0, run.validate()[SCORE])
    for step in range(1, method.max_steps + 1):
        began = cpu_seconds()
        run.trainer.step(step)
        cpu_s += cpu_seconds() - began
        if step % method.validate_every == 0:
            curve.add(step * method.updates_per_step, cpu_s, run.validate()[SCORE])
            if target is not None and curve.scores[-1] >= target:
                break
    return curve


# -- supervised training on the teacher's answers ----------------------------------------------------------------------


class Supervised:
    """Cross-entropy on answers that the teacher samples for the step's prompts, in this process."""

    def __init__(self, seed: int, start: Path, teacher: Path, method: Method) -> None:
        torch.manual_seed(seed)
        self.method, self.tokenizer = method, byte_tokenizer()
        data = DataSpec.of(compiled("base-tiny").data)
        self.prompts = demonstrations(data, seed=seed)
        self.held_out = [demonstrations(data, seed=seed, held_out=True)[i] for i in range(512)]
        self.student, self.teacher = load(start), load(teacher)
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=method.lr, betas=(0.9, 0.95), weight_decay=0.01
        )

    def train(self, target: float) -> Curve:
        curve, cpu_s = Curve(), 0.0
        curve.add(0, 0.0, self.accuracy())
        for step in range(1, self.method.max_steps + 1):
            began = cpu_seconds()
            self.step(step)
            cpu_s += cpu_seconds() - began
            curve.add(step * self.method.updates_per_step, cpu_s, self.accuracy())
            if curve.scores[-1] >= target:
                break
        return curve

    def step(self, step: int) -> None:
        rows, size = self.method.rows, self.method.update_rows
        asked = [self.prompts[i % len(self.prompts)] for i in range((step - 1) * rows, step * rows)]
        answers = self.answers(self.teacher, asked)
        taught = [(messages, answer) for (messages, _), answer in zip(asked, answers, strict=True)]
        for begin in range(0, rows, size):
            tokens, labels = warm_start.batch(self.tokenizer, taught[begin : begin + size])
            self.optimizer.zero_grad()
            self.student(input_ids=tokens, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
            self.optimizer.step()

    def accuracy(self) -> float:
        answers = self.answers(self.student, self.held_out)
        return statistics.mean(answer == right for answer, (_, right) in zip(answers, self.held_out, strict=True))

    @torch.no_grad()
    def answers(self, model: PreTrainedModel, asked: Sequence[Demonstration]) -> list[str]:
        """Sampled at temperature 1; all prompts of the task have the same length."""
        prompts = [
            str(self.tokenizer.apply_chat_template(cast(Any, messages), tokenize=False, add_generation_prompt=True))
            for messages, _ in asked
        ]
        tokens = self.tokenizer(prompts, add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = cast(Any, model).generate(
            tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8,
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return self.tokenizer.batch_decode(made[:, tokens.shape[1] :], skip_special_tokens=True)


def load(folder: Path) -> PreTrainedModel:
    open_model: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    return open_model(folder, dtype=torch.float32)


# -- learning ----------------------------------------------------------------------------------------------------------


def learn(seed: int, names: Sequence[str], scratch: Path, progress: Progress) -> dict[str, Any]:
    """Each method's figures at the target."""
    start = initial_weights(seed, scratch / f"start-{seed}")
    teacher = scratch / f"teacher-{seed}"
    with live(config_of(METHODS["grpo"], seed, start, None), scratch, f"grpo-{seed}") as run:
        curves = {"grpo": train(run, METHODS["grpo"], None)}
        run.export(teacher)
    target = SHARE * curves["grpo"].scores[-1]
    progress(f"seed {seed}: GRPO {curves['grpo'].scores[0]:.3f} → {curves['grpo'].scores[-1]:.3f}")
    for name in names:
        method = METHODS[name]
        if name == "sft":
            curves[name] = Supervised(seed, start, teacher, method).train(target)
        else:
            with live(config_of(method, seed, start, teacher), scratch, f"{name}-{seed}") as run:
                curves[name] = train(run, method, target)
        progress(f"seed {seed}: {name} {curves[name].scores[-1]:.3f} after {curves[name].updates[-1]} updates")
    return {"seed": seed, "target": target, "curves": {name: asdict(curve) for name, curve in curves.items()}}


def at_target(found: dict[str, Any], name: str, figure: str) -> float | None:
    """Updates or CPU-seconds until the target; None if it was not reached."""
    curve = Curve(**found["curves"][name])
    place = curve.reached(found["target"])
    return None if place is None else float(getattr(curve, figure)[place])


def spread(values: Sequence[float]) -> str:
    """The median, and the smallest and the largest."""
    if not values:
        return "–"
    digits = 0 if min(values) >= 10 else 1
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def learning_rows(results: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in ("grpo", *names):
        row = [name, "", f"{sum(at_target(each, name, 'updates') is not None for each in results)}/{len(results)}"]
        for figure in ("updates", "cpu_s"):
            pairs = [(at_target(each, name, figure), at_target(each, "grpo", figure)) for each in results]
            known = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
            row += [spread([mine for mine, _ in known]), spread([theirs / mine for mine, theirs in known])]
        row[1] = METHODS[name].description
        rows.append(row)
    return rows


def learning(seeds: Sequence[int], names: Sequence[str], scratch: Path) -> dict[str, Any]:
    results = []
    for seed in seeds:
        results.append(learn(seed, names, scratch, print))
        save({"learning": {"seeds": results}})  # what was measured stays if a later seed fails
    starts = [each["curves"]["grpo"]["scores"][0] for each in results]
    ends = [each["curves"]["grpo"]["scores"][-1] for each in results]
    show(
        f"to {SHARE:g} of GRPO's score ({spread_of_scores(starts)} → {spread_of_scores(ends)}): median (range); "
        f"wanted: ≥ {FEWER_UPDATES:g} × fewer updates, ≥ {FEWER_CPU_S:g} × fewer CPU-seconds",
        ["", "settings", "reached", "updates", "× fewer", "CPU-s", "× fewer"],
        learning_rows(results, names),
    )
    for name in ("grpo", *names):
        print(f"{name}: {MEANING[name]}")
    return {"seeds": results}


def spread_of_scores(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}".lstrip("0") for value in values)


# -- overlap -----------------------------------------------------------------------------------------------------------

OVERLAP = (
    "model.hidden_size=128", "model.num_layers=4", "model.num_heads=4", "warm_start.steps=0", "rollout.max_running=64",
    "rollout.max_new_tokens=64", "actor.mini_batch_size=256", "actor.lr=1e-6", "data.batch_size=256",
    "rollout.group_size=1", "run.max_steps=1000000",
)  # fmt: skip


class Generating:
    """The rollout of a step, and with teachers the rest of it too."""

    def __init__(self, run: LiveRun, *, batch_rows: int = 0) -> None:
        self.run, self.batch_rows, self.step = run, batch_rows, 0
        self.seconds: dict[str, list[float]] = {}

    def __call__(self) -> None:
        run, self.step = self.run, self.step + 1
        if self.batch_rows:
            assert run.teachers is not None, "a run that scores has teachers"
            run.validator.pool.use_teachers(replace(run.teachers.routes(), batch_rows=self.batch_rows))
            metrics = run.trainer.step(self.step)
        else:
            batch, metrics = run.stages.rollout.generate(self.step)
            run.queue.clear(batch)
        for name, value in (metrics | run.clock.take()).items():
            self.seconds.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][1:])  # the first warms up


def overlap(scratch: Path, repeats: int = 7) -> dict[str, Any]:
    teacher = ("mode=distill", "distillation.loss=forward_kl_topk", 'teachers.one.path="student"')
    no_teacher = ("mode=grpo", "algorithm.advantage=reinforce_plus_plus")
    with (
        live(compiled("base-tiny", *OVERLAP, *teacher), scratch, "scored") as scored,
        live(compiled("base-tiny", *OVERLAP, *no_teacher), scratch, "bare") as bare,
    ):
        ways = {
            "streamed": Generating(scored, batch_rows=32),
            "after generation": Generating(scored, batch_rows=256),
            "no scoring": Generating(bare),
        }
        timings = interleaved(ways, repeats=repeats)
        rest = timings["streamed"].wall - ways["streamed"].median("timing_s/gen")
    found = {name: {"generate_s": way.median("timing_s/gen")} for name, way in ways.items()}
    for name, way in list(ways.items())[:2]:
        found[name] |= {"exposed_s": way.median("teacher/exposed_s"), "step_s": timings[name].wall}
    found["no scoring"]["step_s"] = found["no scoring"]["generate_s"] + rest
    whole = found["after generation"]["generate_s"] - found["no scoring"]["generate_s"]
    added = found["streamed"]["generate_s"] - found["no scoring"]["generate_s"]
    hidden = 1 - added / whole if whole > 0 else 0.0
    show(
        f"256 rows of 64 tokens, 64 at a time, 0.6M model, one thread each: {hidden:.0%} of the scoring is hidden",
        ["scoring", "generate, s", "step, s", "exposed, s"],
        [[name, each["generate_s"], each["step_s"], each.get("exposed_s", "")] for name, each in found.items()],
    )
    return {"ways": found, "hidden_share": hidden}


# -- the wire ----------------------------------------------------------------------------------------------------------


def wire() -> dict[str, Any]:
    backends = score.available(("vllm", "sglang"))
    found = score.measure(backends, repeats=1) if backends else {}
    rows = [
        [name, found[f"{name} json"]["bytes_per_row"], each["bytes_per_row"]]
        for name, each in found.items()
        if not name.endswith(" json")
    ]
    show("bytes on the wire per scored token", ["engine and answer", "JSON", "arrays"], rows)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("learning", "overlap", "wire"), default=["learning", "overlap", "wire"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    methods = [name for name in METHODS if name != "grpo"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tqppo-bench-") as folder, ExitStack() as stack:
        scratch = Path(folder)
        (scratch / "logs").mkdir()
        if {"learning", "overlap"} & set(chosen.parts):
            stack.enter_context(ray_cluster("", num_cpus=12, object_store_bytes=0, logs=scratch / "logs"))
        if "learning" in chosen.parts:
            figures["learning"] = learning(chosen.seeds, chosen.methods, scratch)
        if "overlap" in chosen.parts:
            figures["overlap"] = overlap(scratch)
    if "wire" in chosen.parts:
        figures["wire"] = wire()
    save(figures)


def save(figures: dict[str, Any]) -> None:
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "distill.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
