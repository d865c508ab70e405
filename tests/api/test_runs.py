"""From Python: compiled with a reward that is an object, runs opened and asked, a notebook's event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from doctor.saved_runs import make_run

import tqppo
from tqppo.api.rewards import put_back, reward_names
from tqppo.api.runs import outside_of_event_loops, settings_of
from tqppo.api.table import MetricsTable
from tqppo.errors import ConfigError, DataError, PreflightError
from tqppo.rewards.process import load_function
from tqppo.rewards.scorer import resolve


def length_reward(completions: list[str], **columns: object) -> list[float]:
    return [float(len(each)) for each in completions]


def test_a_function_of_a_file_is_shipped_by_name_and_a_closure_as_a_file(tmp_path: Path) -> None:
    (name,) = reward_names(length_reward, tmp_path)
    assert name == f"{__file__}:length_reward"
    best = 7.0

    def closure(completions: list[str], **columns: object) -> list[float]:
        return [best for _ in completions]

    first, second = reward_names([closure, "exact_match"], tmp_path)
    assert second == "exact_match"
    assert load_function(resolve(first))(completions=["x"]) == [7.0]
    Path(first.rpartition(":")[0]).unlink()
    with pytest.raises(DataError, match="given as an object from Python: give it again"):
        resolve(first)
    put_back([first, second], [closure, "exact_match"])
    assert load_function(resolve(first))(completions=["x"]) == [7.0]


def test_a_wrong_signature_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be called as"):
        reward_names(lambda one: 1.0, tmp_path)


def test_mistakes_are_raised_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key actor\.lrr"):
        tqppo.train("quickstart", overrides={"actor.lrr": 1.0})
    with pytest.raises(PreflightError, match="looked for"):
        tqppo.train("quickstart", overrides={"data.train": "none.jsonl", "warm_start.steps": 0})
    assert not (tmp_path / "runs").exists()


def test_settings_are_written_as_toml() -> None:
    assert settings_of({"actor.lr": 1e-3, "data.train": ["a", "b"]}) == ["actor.lr=0.001", 'data.train=["a", "b"]']
    assert settings_of(["a=1"]) == ["a=1"]


def test_a_run_shows_metrics_checkpoints_and_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lines = [{"step": step, "critic/score/mean": step / 10, "x": 1.0} for step in (1, 2, 3)]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = tqppo.Run.open("mine", tmp_path)
    assert (run.name, run.model_path) == ("mine", None)
    assert run.metrics()["critic/score/mean"] == [0.1, 0.2, 0.3]
    assert run.best_checkpoint == tmp_path / "mine" / "checkpoints" / "step_000003"
    assert repr(run) == "<Run mine: finished, 3 of 3 steps, critic/score/mean 0.300>"
    model, tokenizer = tqppo.load_model(run.folder)
    assert model.config.hidden_size == 64
    assert tokenizer.chat_template
    assert run.evaluate(num_prompts=4).num_prompts == 4


def test_a_table_has_columns_by_name() -> None:
    table = MetricsTable([{"step": 1, "a": 2.0}, {"step": 2, "b": None, "critic/score/mean": 0.5}])
    assert (len(table), table.columns) == (2, ["step", "a", "b", "critic/score/mean"])
    assert table["a"] == [2.0, None]
    assert "<td>0.5</td>" in table._repr_html_()
    with pytest.raises(KeyError, match="no step has the metric 'c'"):
        table["c"]


def test_a_notebook_s_event_loop_is_left_alone() -> None:
    async def cell() -> int:
        return outside_of_event_loops(lambda: asyncio.run(asyncio.sleep(0, 5)))

    assert asyncio.run(cell()) == 5
