"""The node of a process with Ray and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tqppo.processes import nodes

CODE = """
import sys
from tqppo.processes import nodes
print([nodes.this_node(), nodes.num_nodes(), nodes.own_address()], "ray" in sys.modules)
"""


def test_without_ray_there_is_one_node_without_a_name_and_ray_is_not_imported() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['', 1, '127.0.0.1'] False"


@pytest.mark.usefixtures("local_ray")
def test_with_ray_the_node_is_rays() -> None:
    import ray

    assert nodes.is_on_ray()
    assert nodes.this_node() == ray.get_runtime_context().get_node_id()
    assert nodes.num_nodes() == 1
