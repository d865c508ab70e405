"""The presets that a newcomer runs first really learn, on prompts that neither warm start nor training saw."""

from __future__ import annotations

import pytest
from e2e.runs import Cli

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("preset", ["quickstart", "ppo-tiny"])
def test_the_preset_learns_to_sort(cli: Cli, preset: str) -> None:
    said = cli.run("train", "--preset", preset, "--name", "mine", "--set", "run.seed=21", timeout_s=1100)
    rows = [row for row in metrics.read(cli.runs / "mine" / "metrics.jsonl") if "val-core/sort/acc/greedy" in row]
    before, after = rows[0], rows[-1]
    assert before["val-core/sort/acc/mean@1"] < 0.1
    assert after["val-core/sort/acc/mean@1"] >= 0.8
    assert after["val-core/sort/acc/greedy"] - before["val-core/sort/acc/greedy"] >= 0.3
    assert "sampled" in said
    assert "greedy" in said
