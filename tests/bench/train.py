"""A whole GRPO step, through Ray and the queue, against TRL's GRPOTrainer: same model, prompts, batch, limits and rate.

    make bench-train
    python tests/bench/train.py [--cases "0.1M, 2 updates" …] [--subjects ours trl …] [--threads N …] [--repeats N]

TRL is installed apart, without its dependencies, into ~/.cache/tqppo/peers/trl (never into this environment), and runs
in a process of its own. A few steps of each in turn; each side's own processes are counted. Both sides get one thread,
or with --threads 2 two cores: TRL as torch's threads, tqppo as `run.cores`, of which it makes what it does on such a
machine. "recompute" compares like for like, because TRL too takes the old log-probabilities from its own model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.pop("OMP_NUM_THREADS", None)  # set by `make`; --threads says how many a side has
os.environ.setdefault("COLUMNS", "120")  # of a terminal that does not say: the table is wider than the usual 80

from harness import Timing, cpu_seconds, interleaved, publish, show
from transformers import AutoTokenizer

from tqppo.config.compile import compile_config
from tqppo.config.plan.machine import usable_cores
from tqppo.config.sections import Config
from tqppo.data import prompts
from tqppo.data.prompts import DataSpec
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.run.build import build
from tqppo.run.cluster import ray_cluster
from tqppo.run.folder import new_run

PEER = Path.home() / ".cache" / "tqppo" / "peers" / "trl"
PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0", "pandas==3.1.1")
LR = 1e-4  # low, so that the policy, and with it the work, stays much the same for the length of the benchmark
TARGET = 2.0
NUM_PROMPTS = 2048  # that TRL is given: more than it gets to


@dataclass(frozen=True)
class Case:
    """A model, its task, and how many optimizer steps a batch is cut into."""

    hidden_size: int
    num_layers: int
    num_heads: int
    warm_steps: int  # so that two or three answers in five are right: most groups have something to learn from
    digits: int
    max_new_tokens: int
    updates: int
    prompts: int = 32
    group: int = 8
    partial_credit: bool = False  # for a model that was not warmed up: its answers earn something, and seldom the same

    def config(self, *settings: str) -> Config:
        """The quickstart preset, with these sizes."""
        mine = (
            f"model.hidden_size={self.hidden_size}",
            f"model.num_layers={self.num_layers}",
            f"model.num_heads={self.num_heads}",
            f"warm_start.steps={self.warm_steps}",
            f"data.batch_size={self.prompts}",
            f"data.task_args.digits={self.digits}",
            f"data.task_args.partial_credit={str(self.partial_credit).lower()}",
            f"data.max_prompt_tokens={self.digits + 8}",
            f"rollout.group_size={self.group}",
            f"rollout.max_new_tokens={self.max_new_tokens}",
            f"actor.lr={LR}",
            "actor.schedule=constant",
            f"actor.mini_batch_size={self.prompts // self.updates}",
            "run.max_steps=1000000",
        )
        compilation = compile_config("quickstart", overrides=[*mine, *settings], environ={})
        assert compilation.config is not None, compilation.diagnostics
        return compilation.config


SMALL, LARGER = (64, 2, 2, 55, 4, 8), (128, 4, 4, 80, 6, 12)
CASES = {
    "0.1M, 2 updates": Case(*SMALL, updates=2),
    "0.1M, 1 update": Case(*SMALL, updates=1),
    "0.6M, 2 updates": Case(*LARGER, updates=2),
    "0.6M, 1 update": Case(*LARGER, updates=1),
    "1.3M, 60 tokens": Case(128, 6, 4, 1, 23, 58, updates=1, prompts=16, group=4, partial_credit=True),
}
# name → steps a turn, and what it is
SUBJECTS = {
    "ours": (8, "tqppo"),
    "recompute": (8, "tqppo, with a forward of its own for the old log-probabilities instead of the engine's"),
    "trl": (4, "TRL tuned: no bf16, no gradient checkpointing"),
    "static": (4, "TRL tuned, with a static cache"),
    "defaults": (1, "TRL's defaults"),
}
USUAL = ("ours", "recompute", "trl")


class Ours:
    """The parts of a run, built as `tqppo train` builds them, and its trainer's step."""

    def __init__(self, config: Config, runs: Path, name: str, stack: ExitStack) -> None:
        folder = new_run(runs, name, preset="", model="")
        logs = folder.next_attempt()
        self.parts = build(
            config, folder, logs, stack, lambda text: nullcontext(lambda line: None), launcher=RayLauncher()
        )
        self.model, self.step = folder.model, 0
        self.seconds: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            began = time.perf_counter()
            metrics = self.parts.trainer.step(self.step)
            metrics = self.parts.measure(metrics, time.perf_counter() - began)
            if self.step > steps:  # the first turn warms up: processes that still start are in its timings
                self.seconds.update({k: v for k, v in metrics.items() if k.startswith("timing_s/")})
            self.seen.update({"reward": metrics["critic/score/mean"], "length": metrics["response_length/mean"]})

    def description(self) -> dict[str, float]:
        return {name: total / self.step for name, total in self.seen.items()}

    def shares(self) -> dict[str, float]:
        """Each stage's share of the step."""
        whole = self.seconds["timing_s/step"]
        stages = {name.removeprefix("timing_s/"): value / whole for name, value in self.seconds.items()}
        return {name: value for name, value in stages.items() if name != "step"}


class Trl:
    """The other process, asked over a pipe."""

    def __init__(
        self, config: Config, model: Path, scratch: Path, *, updates: int, kind: str, threads: int, stack: ExitStack
    ) -> None:
        log = stack.enter_context((scratch / f"trl-{kind}.log").open("w"))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "peers" / "trl_grpo.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": str(PEER),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        stack.callback(self.close)
        self.log = Path(log.name)
        self.total: Counter[str] = Counter()
        self.group = config.rollout.group_size
        settings = {
            "model": str(model),
            "scratch": str(scratch / "trl"),
            "kind": kind,
            "threads": threads,
            "reward": "partial_match" if config.data.task_args.get("partial_credit") else "exact_match",
            "updates": updates,
            "dataset": self._dataset(config, model),
            "prompts": config.data.batch_size,
            "group": self.group,
            "max_new_tokens": config.rollout.max_new_tokens,
            "lr": config.actor.lr,
            "clip": config.algorithm.clip_low,
        }
        self._say(json.dumps(settings))
        self._hear()

    def _dataset(self, config: Config, model: Path) -> list[dict[str, str]]:
        tokenizer = AutoTokenizer.from_pretrained(model)
        found = prompts.load(DataSpec.of(config.data), tokenizer, seed=config.run.seed).first(NUM_PROMPTS)
        assert all(tokenizer(each.text)["input_ids"] == each.tokens for each in found[:32])
        return [{"prompt": each.text, "answer": str(each.answer)} for each in found]

    def run(self, steps: int) -> None:
        self._say(str(steps))
        self.total.update(self._hear())

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def description(self) -> dict[str, float]:
        samples, group = self.total["samples"], self.group
        return {
            "reward": self.total["reward"] / samples,
            "length": self.total["tokens"] / samples,
            "flat_groups": self.total["flat_groups"] * group / samples,  # all of whose sessions earned the same
        }

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"TRL ended: {self.log.read_text()[-2000:]}")
        figures: dict[str, float] = json.loads(line)
        return figures


def install_peer() -> None:
    """TRL and those of its dependencies that are not here, into their own folder."""
    if not (PEER / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(PEER), *PACKAGES]
        subprocess.run(command, check=True)


def measure(case: Case, names: list[str], repeats: int, threads: int, scratch: Path) -> dict[str, Any]:
    """Each subject's figures, and each stage's share of our step."""
    cores = f"run.cores={threads}"
    config = case.config(cores)
    with ExitStack() as stack:
        logs = scratch / "logs"
        logs.mkdir()
        stack.enter_context(ray_cluster("", num_cpus=4, object_store_bytes=0, logs=logs))
        ours = {"ours": Ours(config, scratch, "ours", stack)}
        if "recompute" in names:
            ours["recompute"] = Ours(
                case.config(cores, "algorithm.old_logprobs=recompute"), scratch, "recompute", stack
            )
        start = partial(Trl, config, ours["ours"].model, scratch, updates=case.updates, threads=threads, stack=stack)
        trl = {name: start(kind=name) for name in names if name in ("trl", "static", "defaults")}
        subjects: dict[str, Ours | Trl] = {**ours, **trl}
        timings = interleaved(
            {name: partial(subjects[name].run, SUBJECTS[name][0]) for name in names},
            repeats=repeats,
            meters={name: peer.cpu_seconds for name, peer in trl.items()},
        )
        rows = config.data.batch_size * config.rollout.group_size
        found = {name: figures(timing, rows * SUBJECTS[name][0]) for name, timing in timings.items()}
        for name, figure in found.items():
            figure.update(subjects[name].description())
        return {"subjects": found, "shares": {name: ours[name].shares() for name in ours if name in names}}


def figures(timing: Timing, samples: int) -> dict[str, float]:
    return {"samples_per_s": samples / timing.wall, "samples_per_cpu_s": samples / timing.cpu}


def table_rows(name: str, found: dict[str, dict[str, float]]) -> list[list[Any]]:
    peer = found.get("trl")
    rows = []
    for subject, each in found.items():
        ratios = [each[key] / peer[key] if peer else "" for key in ("samples_per_s", "samples_per_cpu_s")]
        speeds = [round(each["samples_per_s"]), round(each["samples_per_cpu_s"])]
        rows.append(
            [f"{name}: {subject}", *speeds, *ratios, each["length"], each["reward"], each.get("flat_groups", "")]
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(USUAL))
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, usable_cores()}))
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    install_peer()
    results = {}
    for name, threads in product(chosen.cases, chosen.threads):
        with tempfile.TemporaryDirectory(prefix="tqppo-bench-") as scratch:
            title = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            results[title] = measure(CASES[name], chosen.subjects, chosen.repeats, threads, Path(scratch))
    stages = list(
        dict.fromkeys(stage for each in results.values() for shares in each["shares"].values() for stage in shares)
    )
    shares = [
        [f"{name}: {subject}", *(f"{100 * shares.get(stage, 0):.0f} %" for stage in stages)]
        for name, each in results.items()
        for subject, shares in each["shares"].items()
    ]
    show("share of each stage of our step, wall", ["", *stages], shares)
    publish(
        "train",
        f"GRPO steps; wanted: ≥ {TARGET:g} × TRL tuned",
        ["", "samples/s", "samples/CPU-s", "× TRL tuned (s)", "(CPU-s)", "mean length", "mean reward", "flat groups"],
        [row for name, each in results.items() for row in table_rows(name, each["subjects"])],
        results,
    )
    for name in chosen.subjects:
        print(f"{name}: {SUBJECTS[name][1]}")


if __name__ == "__main__":
    main()
