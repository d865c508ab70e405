"""Whole runs in one process: every mode, signals, checkpoints and validation, without Ray."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from e2e.runs import MODES, SMALL

from tqppo.api.runs import Run, train
from tqppo.config.compile import compile_config
from tqppo.errors import WorkerError
from tqppo.metrics import files as metrics_files
from tqppo.run.cluster import Hooks
from tqppo.run.folder import RunFolder
from tqppo.run.launch import launcher_of
from tqppo.run.one_process import one_process
from tqppo.run.start import resumed_config
from tqppo.workers.actor import Actor

AGENT = (
    SMALL.replace('"task:sort"', '"task:lookup"').replace("task_args = { digits = 3, partial_credit = true }\n", "")
    + '[rollout.agent_args]\ntools = ["tqppo.data.lookup:f"]\nparser = "tiny"\nmax_turns = 2\nkeep_turns = 1\n'
).replace("[rollout]\n", '[rollout]\nagent = "rewrite"\nmax_trajectories = 2\nmax_context_tokens = 64\n')
CASES = {**MODES, "agent": 'mode = "grpo"\n' + AGENT}
TIMES = ("timing_s/", "perf/", "time", "throughput", "teacher/")  # teachers answer from their cache, too


@dataclass(frozen=True)
class Runs:
    """Runs of a test, in its folder."""

    folder: Path

    def train(self, mode: str, name: str, *settings: str, at_step: Callable[[int], None] = lambda step: None) -> Run:
        config = self.folder / f"{mode}.toml"
        config.write_text(CASES[mode])
        own = [f'run.dir="{self.folder / "runs"}"', f"run.name={name}", "run.max_steps=2", "cluster.in_process=true"]
        calls = [lambda step, metrics: at_step(step)]
        return train(config, overrides=[*own, *settings], callbacks=calls, probe=False, quiet=True)

    def results(self, name: str) -> tuple[list[dict[str, object]], dict[str, bytes]]:
        """Metrics without times, and the files of the last checkpoint."""
        folder = RunFolder(self.folder / "runs" / name)
        rows = [
            {key: value for key, value in row.items() if not key.startswith(TIMES)}
            for row in metrics_files.read(folder.metrics)
        ]
        saved = sorted((folder.path / "checkpoints").glob("step_*"))[-1]
        return rows, {path.name: path.read_bytes() for path in saved.rglob("*.safetensors")}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize("mode", CASES)
def test_every_mode_trains_validates_and_exports(runs: Runs, mode: str) -> None:
    before, running, seen = torch_now(), loops(), list[int]()
    run = runs.train(mode, mode, at_step=seen.append)
    assert seen == [0, 1, 2]
    rows, files = runs.results(mode)
    assert any(key.startswith("val") for key in rows[-1])
    if mode == "agent":  # an untaught model earns nothing, so that no group has a signal
        assert rows[-1]["agent/turns"] == 1
    else:
        assert "actor/grad_norm" in rows[-1]
    assert files
    assert (run.folder / "export" / "hf" / "model.safetensors").is_file()
    assert torch_now() == before
    assert leftovers(running) == []


def test_an_adapter_trains_and_is_saved(runs: Runs) -> None:
    run = runs.train("grpo", "lora", "model.lora_rank=4")
    rows, files = runs.results("lora")
    assert "actor/grad_norm" in rows[-1]
    assert all("lora_" in name for name in safetensors.torch.load(files["model.safetensors"]))
    assert (run.folder / "export" / "hf" / "model.safetensors").is_file()


def test_a_breakpoint_in_a_loss_stops_in_the_thread_of_the_step(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    stops, loss = list[threading.Thread](), Actor._loss

    def stopping(self: Actor, *given: Any, **named: Any) -> Any:
        breakpoint()
        return loss(self, *given, **named)

    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(threading.current_thread()))
    monkeypatch.setattr(Actor, "_loss", stopping)
    runs.train("grpo", "stopped")
    assert set(stops) == {threading.main_thread()}


def interrupted(runs: Runs, name: str, *settings: str, times: int, mode: str = "ppo", after: int = 1) -> None:
    """Train, and send this process the signal of Ctrl-C after a step."""

    def at_step(step: int) -> None:
        for _ in range(times if step == after else 0):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"Run\.resume goes on with it"):
        runs.train(mode, name, *settings, at_step=at_step)


def torch_now() -> tuple[int, bool, int]:
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.initial_seed()


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tqppo-loop"]


def leftovers(before: list[threading.Thread]) -> list[str]:
    """Loops that were not there before, and weights of this process."""
    mine = f"-{os.getpid()}-"
    return [thread.name for thread in loops() if thread not in before] + [
        path.name for path in Path("/dev/shm").glob("tqppo-weights-*") if mine in path.name
    ]


def test_a_run_that_ctrl_c_stopped_goes_on_to_the_same_bytes(runs: Runs) -> None:
    runs.train("ppo", "whole")
    interrupted(runs, "halves", times=1)
    assert [row["step"] for row in runs.results("halves")[0]] == [0, 1]
    Run(runs.folder / "runs" / "halves").resume(quiet=True)
    assert runs.results("halves") == runs.results("whole")


AHEAD = ("run.max_steps=5", "validation.interval=2", "algorithm.filter_groups=true")


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        ("grpo", 1),
        ("ppo", 2),
        ("distill", 1),
        pytest.param("agent", 2, marks=pytest.mark.long),
        pytest.param("grpo", 9, marks=pytest.mark.long),  # beyond the last step
    ],
)
def test_a_run_that_samples_ahead_goes_on_to_the_same_bytes(runs: Runs, mode: str, ahead: int) -> None:
    settings = (*AHEAD[: 3 if mode in ("grpo", "ppo") else 2], f"rollout.ahead={ahead}")
    runs.train(mode, "whole", *settings)
    behind = [row.get("training/off_policy/versions_behind/max") for row in runs.results("whole")[0]]
    assert behind == [None, *(min(step, ahead) for step in range(5))]
    interrupted(runs, "halves", *settings, times=1, mode=mode, after=3)
    saved = json.loads((runs.folder / "runs" / "halves" / "checkpoints" / "latest" / "driver.json").read_text())
    assert [each["step"] for each in saved["ahead"]] == [4, 5][:ahead]
    Run(runs.folder / "runs" / "halves").resume(quiet=True)
    assert runs.results("halves") == runs.results("whole")


def test_a_second_ctrl_c_aborts_and_leaves_nothing_behind(runs: Runs) -> None:
    running = loops()
    interrupted(runs, "aborted", times=2)
    assert leftovers(running) == []


def test_an_error_in_a_role_is_raised_with_its_place(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Actor, rows: object, *, step: int, sizes: object = ()) -> dict[str, float]:
        raise ArithmeticError("no gradient today")

    monkeypatch.setattr(Actor, "_loss", broken)
    with pytest.raises(WorkerError, match=r"(?s)actor rank 0 failed in update.*Traceback.*_loss"):
        runs.train("grpo", "broken")


def test_only_a_config_that_asks_for_one_process_gets_it(tmp_path: Path) -> None:
    config = compile_config(None, [], ["cluster.in_process=true"], {}).draft
    with ExitStack() as stack:
        launcher = launcher_of(config, tmp_path, stack, lambda text: nullcontext(), Hooks())
        assert type(launcher).__name__ == "LocalLauncher"
    with one_process(1, tmp_path) as launcher:
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("mode", ["grpo", "ppo"])
def test_two_threads_give_the_same_bytes_each_time(runs: Runs, mode: str) -> None:
    wide = ("model.hidden_size=128", "rollout.max_new_tokens=16", "run.threads=2")
    for name in ("one", "other"):
        runs.train(mode, name, *wide)
    assert runs.results("one") == runs.results("other")


def test_a_run_writes_down_its_cores_and_a_resume_has_as_many(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    runs.train("grpo", "one")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert resumed_config(RunFolder(runs.folder / "runs" / "one"), []).run.cores == 2
