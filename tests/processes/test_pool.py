from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tqppo.errors import DataError
from tqppo.processes.pool import ProcessPool, SampleFailed
from tqppo.rewards.scorer import FunctionSpec, process_spec

FUNCTION = """
import os

def grade(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "die":
        os._exit(3)
    return os.getpid()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    (tmp_path / "grades.py").write_text(FUNCTION)
    made = ProcessPool(process_spec(FunctionSpec(f"{tmp_path}/grades.py:grade", {}, 1.0, "grade"), 10.0), 1)
    yield made
    made.close()


def sample(solution: str) -> dict[str, object]:
    return {"source": "test", "solution": solution, "answer": "", "extra": {}}


def test_samples_share_a_process_and_a_dead_one_is_replaced(pool: ProcessPool) -> None:
    first = pool.call(sample("a"))
    assert pool.call(sample("b")) == first
    with pytest.raises(SampleFailed, match=r"its process died \(exit code 3\)"):
        pool.call(sample("die"))
    assert pool.call(sample("c")) != first


def test_a_closed_pool_refuses_samples(pool: ProcessPool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(SampleFailed, match="closed"):
        pool.call(sample("a"))


def test_a_function_that_cannot_be_imported_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="cannot import no_such_module"):
        ProcessPool(process_spec(FunctionSpec("no_such_module:f", {}, 1.0, "f"), 10.0), 1)
