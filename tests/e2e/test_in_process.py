"""A run in one process imports no Ray, and ends in the bytes of the run with Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import MODES, Cli

from tqppo.metrics import files as metrics

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from tqppo.cli import app; app()"  # importing it is an error
TIMES = ("timing_s/", "perf/", "time")


def results(run: Path) -> tuple[list[dict[str, object]], dict[str, bytes]]:
    """Metrics without times, and the files of models, optimizers and random numbers."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(TIMES)}
        for row in metrics.read(run / "metrics.jsonl")
    ]
    files = [*(run / "checkpoints").rglob("*.safetensors"), *(run / "export").rglob("*.safetensors")]
    return rows, {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.timeout(600)
def test_one_process_and_ray_give_the_same_metrics_and_weights(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ppo.toml").write_text(MODES["ppo"])
    train = ["train", "--config", "ppo.toml", "--max-steps", "2", "--no-probe", f"run.dir={tmp_path / 'runs'}"]
    command = [sys.executable, "-c", WITHOUT_RAY, *train, "--in-process", "--name", "alone"]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    process = cli.start(*train, "--name", "ray")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    (rows, files), (others_rows, others_files) = results(cli.runs / "alone"), results(cli.runs / "ray")
    assert rows == others_rows
    assert files.keys() == others_files.keys()
    assert [name for name, data in files.items() if data != others_files[name]] == []
    assert len(files) > 4
