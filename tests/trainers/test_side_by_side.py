"""Stages that do not need each other: at once or one after the other, and their time."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
import threading
import time
from itertools import permutations

import pytest

from tqppo import dataflow, plugins
from tqppo.config.compile import compile_config
from tqppo.config.placement import runs_at_once
from tqppo.errors import WorkerError
from tqppo.queue.meta import BatchMeta
from tqppo.trainers.side_by_side import Clock, SideBySide

BATCH = BatchMeta("train", ("a",), ({},), ("tokens",))


@pytest.mark.parametrize("at_once", [True, False])
def test_the_batch_has_the_columns_of_all_stages_in_their_order(at_once: bool) -> None:
    def slow() -> BatchMeta:
        time.sleep(0.05)
        return BATCH.with_columns("old_logprobs")

    found = SideBySide(at_once).columns(slow, lambda: BATCH, lambda: BATCH.with_columns("values"))
    assert found.columns == ("tokens", "old_logprobs", "values")
    assert SideBySide(at_once).updates(lambda: {"a": 1.0}, dict, lambda: {"b": 2.0}) == {"a": 1.0, "b": 2.0}


def test_stages_at_once_wait_for_each_other_and_those_in_turn_would_not() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def meet() -> BatchMeta:
        meeting.wait()
        return BATCH

    SideBySide(at_once=True).columns(meet, meet)
    meeting = threading.Barrier(2, timeout=0.01)
    with pytest.raises(threading.BrokenBarrierError):
        SideBySide(at_once=False).columns(meet, meet)


def test_a_failure_is_raised_while_another_stage_still_computes() -> None:
    ended = threading.Event()

    def fail() -> BatchMeta:
        raise WorkerError("critic rank 0 failed")

    def go_on() -> BatchMeta:
        ended.wait(20)
        return BATCH

    began = time.monotonic()
    with pytest.raises(WorkerError, match="critic rank 0 failed"):
        SideBySide(at_once=True).columns(go_on, fail)
    assert time.monotonic() - began < 10
    ended.set()


STUCK = """
import threading
from tqppo.trainers.side_by_side import SideBySide

def fail():
    raise SystemExit(7)

SideBySide(True).updates(threading.Event().wait, fail)
"""


def test_a_stage_that_never_ends_does_not_hold_up_the_end_of_the_process_after_a_failure() -> None:
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=60, check=False).returncode == 7


def test_the_seconds_of_stages_that_overlap_add_up_to_the_time_that_passed() -> None:
    clock = Clock()
    began = time.perf_counter()
    with clock.time("one"):
        time.sleep(0.05)
        with clock.time("other"):
            time.sleep(0.1)
    passed = time.perf_counter() - began
    found = clock.take()
    assert sum(found.values()) == pytest.approx(passed, abs=0.01)
    assert found["timing_s/other"] == pytest.approx((passed - 0.05) / 2, abs=0.02)
    assert list(found) == ["timing_s/one", "timing_s/other"]
    with clock.time("one"):
        pass
    assert clock.take()["timing_s/one"] < 0.05, "time between stages is nobody's"


@pytest.mark.parametrize("mode", dataflow.MODES.values(), ids=lambda mode: mode.name)
def test_no_stage_reads_what_one_at_its_side_writes(mode: dataflow.Mode) -> None:
    stages = {stage.name: stage for stage in mode.stages}
    source = textwrap.dedent(inspect.getsource(plugins.import_object(mode.trainer).step))
    calls = [
        [ast.unparse(argument.body).split("(")[0].removeprefix("self.") for argument in node.args]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in ("self.side_by_side.columns", "self.side_by_side.updates")
    ]
    assert calls, "every mode has stages that do not need each other"
    for names in calls:
        for one, other in permutations(names, 2):
            shared = set(stages[one].writes_when) & {*stages[other].reads_when, *stages[other].writes_when}
            assert not shared, f"{one} and {other}: {shared}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], True),
        (["cluster.in_process=true"], False),
        (["cluster.gpus_per_node=1"], False),
        (["cluster.gpus_per_node=8", "cluster.colocate=false"], True),
    ],
)
def test_roles_that_share_a_gpu_or_a_process_compute_in_turn(settings: list[str], expected: bool) -> None:
    config = compile_config("ppo-tiny", overrides=settings, environ={}).config
    assert config is not None
    assert runs_at_once(config) == expected
