"""Paths of a TOML file are relative to it; those of `--set`, of the environment and of built-in presets are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.read.paths import absolute
from tqppo.config.sections import Config
from tqppo.config.show.export import resolved_toml

OWN = """
[data]
train = ["train.jsonl", "task:sort", "~/x.jsonl", "hub:a/b"]
[reward]
function = "reward.py:score"
[rollout]
agent = "tools"
agent_args = { tools = ["tools.py:add", "package.module:sub"], max_turns = 3 }
[model]
path = "model"
tokenizer = "./tokenizer"
[validation]
data = "../held/*.jsonl"
[reference]
path = "org/name"
[algorithm]
kl_loss = "k3"
kl_loss_coef = 0.1
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "run.toml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return compile_config(None, ["mine/run.toml"], [], {}).draft


def test_files_functions_and_folders_lie_beside_the_file_that_names_them(config: Config) -> None:
    assert config.data.train == ["mine/train.jsonl", "task:sort", "~/x.jsonl", "hub:a/b"]
    assert config.reward.function == "mine/reward.py:score"
    assert config.rollout.agent_args["tools"] == ["mine/tools.py:add", "package.module:sub"]
    assert (config.model.path, config.model.tokenizer) == ("mine/model", "mine/tokenizer")
    assert (config.validation.data, config.reference.path) == ("held/*.jsonl", "org/name")


def test_a_setting_is_relative_to_the_current_folder(config: Config) -> None:
    environ = {"TQPPO__VALIDATION__DATA": "held.jsonl"}
    changed = compile_config(None, ["mine/run.toml"], ["data.train=a.jsonl"], environ).draft
    assert (changed.data.train, changed.validation.data) == ("a.jsonl", "held.jsonl")


def test_the_resolved_config_means_the_same_from_another_folder(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "resolved.toml").write_text(resolved_toml(config))
    assert compile_config(None, ["runs/resolved.toml"], [], {}).draft == config
    monkeypatch.chdir("/")
    elsewhere = compile_config(None, [tmp_path / "runs" / "resolved.toml"], [], {}).draft
    assert elsewhere.data.train[0] in (f"{tmp_path}/mine/train.jsonl", f"{tmp_path}/mine/train.jsonl"[1:])


def test_names_of_teachers_do_not_hide_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(("teachers", "t", "path"), "./t") == f"{tmp_path}/t"
    assert absolute(("teachers", "t", "path"), "org/t") == "org/t"
