"""What must not matter does not: the storage, and the number of ranks."""

from __future__ import annotations

import pytest
from e2e.runs import Cli

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def figures(cli: Cli, name: str) -> list[dict[str, float]]:
    return [metrics.without_timings(row) for row in metrics.read(cli.runs / name / "metrics.jsonl")]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["grpo", "ppo"])
def test_storages_and_ranks_give_the_same_metrics(cli: Cli, mode: str) -> None:
    two = ["actor.ranks=2", "critic.ranks=2"] if mode == "ppo" else ["actor.ranks=2"]
    cli.train("simple", mode)
    cli.train("ray", mode, 'storage.backend="ray"')
    cli.train("ranks", mode, 'storage.backend="ray"', *two)
    expected = figures(cli, "simple")
    assert figures(cli, "ray") == expected
    assert cli.weights("ray") == cli.weights("simple")
    for found, wanted in zip(figures(cli, "ranks"), expected, strict=True):
        multiple = {"padding/multiple"}
        assert {key: found[key] for key in found.keys() - multiple} == pytest.approx(
            {key: wanted[key] for key in wanted.keys() - multiple}, abs=1e-5, rel=1e-5
        )
