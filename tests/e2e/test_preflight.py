"""What cannot work is said before anything waits."""

from __future__ import annotations

import pytest
from e2e.runs import Cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_plan_larger_than_the_cluster_ends_with_the_arithmetic(cli: Cli) -> None:
    said = cli.train("mine", "grpo", "cluster.cpus_per_worker=1000", code=4)
    assert "the plan needs 1000 CPUs, the cluster has" in said
    assert "actor 1 × 500 + rollout 1 × 500 = 1000" in said


def test_a_model_that_is_not_there_is_named(cli: Cli) -> None:
    said = cli.run("train", "--preset", "quickstart", "--set", 'model.path="/nowhere/model"', code=4)
    assert "/nowhere/model" in said
    assert "Traceback" not in said
