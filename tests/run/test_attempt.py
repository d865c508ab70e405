"""What a start of a run does to the files of the starts before it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.metrics import files as metrics
from tqppo.run.attempt import Attempt
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.folder import new_run
from tqppo.run.lock import RunLock


def test_a_run_that_goes_on_from_an_earlier_step_leaves_no_metrics_or_checkpoints_to_jump_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = new_run(tmp_path, "mine", preset="", model="tiny")
    store = CheckpointStore(folder.checkpoints, keep_last=9)
    for step in (1, 2, 3, 4):
        metrics.MetricsLog(folder.metrics).write(step, {})
        store.write(step, lambda path: None, {})
    (folder.checkpoints / ".partial-step_000005-ab").mkdir()
    config = compile_config("quickstart", [], [], {}).draft
    earlier = store.open(folder.checkpoints / "step_000002")
    with RunLock(folder.path) as lock, caplog.at_level(logging.WARNING):
        Attempt(config, folder, earlier, lock, 0).go_back()
    assert store.steps() == [1, 2]
    assert [line["step"] for line in metrics.read(folder.metrics)] == [1, 2]
    assert not list(folder.checkpoints.glob(".partial*"))
    assert "later checkpoints (3, 4)" in caplog.text
