"""What distillation saves: updates and CPU-seconds to the score of a GRPO run, from the same initial weights.

    make bench-distill
    python tests/bench/distill.py [--parts learning overlap …] [--seeds 51 52 …] [--methods top-k …]

`learning`: GRPO trains a tiny model to its score s and is the teacher from then on. Each method starts from GRPO's
initial weights and trains until its held-out, sampled accuracy is 0.95 s. All roles run in this process, as with
`tqppo train --in-process`; CPU-seconds are those of the steps, teachers included, without start-up and validation.
`overlap`: a step with scoring streamed, after generation and without, each role in a process of its own. `wire`: bytes
of vLLM's and SGLang's answers per scored token, as JSON and as arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "140")  # of a terminal that does not say: the table is wider than the usual 80

import score
import torch
from distill_methods import MEANING, METHODS, Curve, Supervised, compiled, config_of, initial_weights, live, train
from harness import OUTPUT, interleaved, show
from transformers.utils import logging

from tqppo.processes.hosting import Launcher
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.run.cluster import ray_cluster
from tqppo.run.live import LiveRun
from tqppo.run.one_process import one_process

PARTS = ("learning", "overlap", "wire")
SEEDS = (51, 52, 53, 54, 55)  # not used to choose a setting
SHARE = 0.95  # of GRPO's score
FEWER_UPDATES, FEWER_CPU_S = 7.0, 3.0  # wanted, as factors
ALONE = "cluster.in_process=true"


# -- learning ----------------------------------------------------------------------------------------------------------


def learn(seed: int, names: Sequence[str], scratch: Path, launcher: Launcher) -> dict[str, Any]:
    """Each method's figures at the target."""
    start = initial_weights(seed, scratch / f"start-{seed}")
    teacher = scratch / f"teacher-{seed}"
    with live(config_of(METHODS["grpo"], seed, start, None, ALONE), scratch, f"grpo-{seed}", launcher) as run:
        curves = {"grpo": train(run, METHODS["grpo"], None)}
        run.export(teacher)
    target = SHARE * curves["grpo"].scores[-1]
    print(f"seed {seed}: GRPO {curves['grpo'].scores[0]:.3f} → {curves['grpo'].scores[-1]:.3f}")
    for name in names:
        method = METHODS[name]
        if name == "sft":
            curves[name] = Supervised(seed, start, teacher, method).train(target)
        else:
            with live(config_of(method, seed, start, teacher, ALONE), scratch, f"{name}-{seed}", launcher) as run:
                curves[name] = train(run, method, target)
        print(f"seed {seed}: {name} {curves[name].scores[-1]:.3f} after {curves[name].updates[-1]} updates")
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
    with one_process(1, scratch / "logs") as launcher:
        for seed in seeds:
            results.append(learn(seed, names, scratch, launcher))
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
        live(compiled("base-tiny", *OVERLAP, *teacher), scratch, "scored", RayLauncher()) as scored,
        live(compiled("base-tiny", *OVERLAP, *no_teacher), scratch, "bare", RayLauncher()) as bare,
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
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
        if "learning" in chosen.parts:
            figures["learning"] = learning(chosen.seeds, chosen.methods, scratch)
        if "overlap" in chosen.parts:
            stack.enter_context(ray_cluster("", num_cpus=12, object_store_bytes=0, logs=scratch / "logs"))
            figures["overlap"] = overlap(scratch)
    if "wire" in chosen.parts:
        figures["wire"] = wire()
    save(figures)


def save(figures: dict[str, Any]) -> None:
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "distill.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
