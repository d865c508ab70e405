"""Nodes that differ from the driver's are named with the difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.run.nodes import NodeReport, check_nodes, differences, files_of_all_nodes, look, shortages

MINE = NodeReport("node 10.0.0.1 (a)", {"torch": "2.13.0", "tqppo": "1.0"}, {"/m/config.json": "1f", "/r.py": "2e"}, 10)
OTHER = replace(MINE, node="node 10.0.0.2 (b)")


def test_nodes_that_are_alike_pass() -> None:
    assert differences(MINE, [OTHER, OTHER]) == []


def test_every_difference_is_said_with_its_node() -> None:
    versions = replace(OTHER, versions={"torch": "2.12.0"})
    files = replace(OTHER, files={"/m/config.json": "1f00", "/r.py": "missing"})
    unreadable = replace(
        OTHER, node="node 10.0.0.3 (c)", files={**MINE.files, "/r.py": "cannot be read: Permission denied"}
    )
    assert differences(MINE, [versions, files, unreadable]) == [
        "node 10.0.0.2 (b): torch is 2.12.0, and 2.13.0 on the driver's node 10.0.0.1 (a)",
        "node 10.0.0.2 (b): tqppo is missing, and 1.0 on the driver's node 10.0.0.1 (a)",
        "node 10.0.0.2 (b): /m/config.json is not what it is on the driver's node 10.0.0.1 (a)",
        "node 10.0.0.2 (b): /r.py is missing",
        "node 10.0.0.3 (c): /r.py cannot be read: Permission denied",
    ]


def test_a_small_dev_shm_is_said() -> None:
    assert shortages([MINE, replace(OTHER, shared_bytes=3 << 20)], 2.0) == []
    (said,) = shortages([replace(OTHER, shared_bytes=1 << 20)], 2 << 30)
    assert said == "node 10.0.0.2 (b): /dev/shm has 1.0 MiB free, and rows and new weights take 2.0 GiB"


def test_what_is_compared_are_the_run_s_config_the_model_and_the_user_s_code(tmp_path: Path) -> None:
    model, code = tmp_path / "model", tmp_path / "mine.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    code.write_text("1")
    config = compile_config("quickstart", [], [f'reward.function="{code}:score"'], {}).draft
    files = files_of_all_nodes(config, tmp_path / "config.resolved.toml", str(model))
    assert files == [str(tmp_path / "config.resolved.toml"), str(model), str(code)]
    assert files_of_all_nodes(config, tmp_path / "c", "Qwen/Qwen2.5-7B") == [str(tmp_path / "c"), str(code)]
    before = look(files)
    assert before.files[files[0]] == "missing"
    assert before.versions["torch"].startswith("2.")
    (model / "config.json").write_text("{ }")
    code.unlink()
    said = differences(before, [look(files)])
    assert [line.partition(": ")[2].partition(" on the")[0] for line in said] == [
        f"{files[0]} is missing",
        f"{model} is not what it is",
        f"{code} is missing",
    ]


@pytest.mark.slow
def test_the_node_of_a_cluster_reports(local_ray: None, tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").write_text("")
    check_nodes(compile_config("quickstart", environ={}).draft, tmp_path / "config.resolved.toml", str(tmp_path))
