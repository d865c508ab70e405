"""The plan of a worker's memory against the peaks that a tracker measured at true shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tqppo.config.plan.memory import Training, total, training_memory
from tqppo.config.plan.shapes import shape_of
from tqppo.units import size

HERE = Path(__file__).parent
TRACKED = json.loads((HERE / "tracked.json").read_text())


def planned(case: dict[str, object]) -> float:
    shape = shape_of(str(case["model"]))
    assert shape is not None
    how = {name: value for name, value in case.items() if name != "model"}
    return total(training_memory(shape, Training(dtype="bfloat16", **how)))  # type: ignore[arg-type]


@pytest.mark.parametrize("each", TRACKED, ids=lambda each: "-".join(map(str, each["case"].values())))
def test_the_plan_is_within_ten_percent_of_the_tracker(each: dict[str, object]) -> None:
    case, measured = each["case"], each["bytes"]
    assert isinstance(case, dict)
    assert isinstance(measured, int)
    estimate = planned(case)
    assert estimate == pytest.approx(measured, rel=0.1), f"planned {size(estimate)}, tracked {size(measured)}"


def test_five_shapes_were_tracked_as_actor_and_as_reference() -> None:
    shapes = {f"Qwen/Qwen2.5-{size}B" for size in ("0.5", "1.5", "7", "32")} | {"meta-llama/Llama-3.1-8B"}
    for learns in (True, False):
        assert shapes <= {each["case"]["model"] for each in TRACKED if each["case"]["learns"] is learns}


@pytest.mark.long
def test_the_table_is_what_the_tracker_says(tmp_path: Path) -> None:
    table = tmp_path / "tracked.json"
    wanted = ["--table", str(table), "Qwen2.5-0.5B"]
    subprocess.run([sys.executable, str(HERE / "track.py"), *wanted], check=True, cwd=HERE.parents[2])
    again = json.loads(table.read_text())
    assert len(again) >= 2
    for each in again:
        assert each in TRACKED
