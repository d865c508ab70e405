"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tqppo import dataflow

README = Path(__file__).parent.parent / "README.md"


def test_the_queue_s_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert [row.tolist() for row in names["found"]["tokens"].unbind()] == [[0, 1, 2, 3, 4]]
    assert names["found"]["reward"].tolist() == [1.0]


def test_the_picture_of_a_step_shows_the_stages_and_columns_of_ppo() -> None:
    (picture,) = re.findall(r"<!-- step: begin -->\n```\n(.*?)```", README.read_text(), re.DOTALL)
    drawn = {line.split()[0]: line for line in picture.splitlines()[2:]}
    stages = {stage.name: stage for stage in dataflow.MODES["ppo"].stages}
    assert [name for name in drawn if name in stages] == list(stages)
    for name, stage in stages.items():
        put = drawn[name].partition(" put ")[2].split(", ") if " put " in drawn[name] else []
        assert [column.strip() for column in put] == list(stage.writes(EVERYTHING)), name


EVERYTHING = dataflow.Features(
    has_critic=True, uses_values=True, has_reward_model=True, kl_in_loss=True, recomputes_old_logprobs=True
)
