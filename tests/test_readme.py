"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def test_the_queue_s_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert [row.tolist() for row in names["found"]["tokens"].unbind()] == [[0, 1, 2, 3, 4]]
    assert names["found"]["reward"].tolist() == [1.0]
