"""Runs and models after training: opened, asked, scored, exported, from the command line too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doctor.saved_runs import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.doctor.evaluate import evaluate_model, named_figures
from tqppo.doctor.models import is_model, opened, saved_actor
from tqppo.doctor.sessions import ModelSessions
from tqppo.errors import UsageError
from tqppo.metrics.validation import Answer
from tqppo.workers import export


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs")
    return tmp_path


def test_a_run_a_folder_and_a_hub_name_are_told_apart(runs: Path, tiny_model: Path) -> None:
    assert is_model(str(tiny_model))
    assert is_model("org/name")
    assert not is_model("mine")
    assert not is_model("runs/mine")
    with (
        pytest.raises(UsageError, match=r"'other' is neither a checkpoint nor a run; runs in runs/: mine\. A model is"),
        opened("other"),
    ):
        pass


def test_answers_are_the_same_each_time_and_a_greedy_one_comes_last(runs: Path) -> None:
    with opened("mine") as model, ModelSessions(model) as sessions:
        prompts = sessions.prompts(["3142", "4321"])
        first, again = (sessions.answers(prompts, samples=2, greedy=True) for _ in range(2))
    assert model.name == "mine, step 3"
    assert [each.text for each in first] == [each.text for each in again]
    assert [each.is_greedy for each in first] == [False, False, True] * 2


def test_more_questions_than_may_play_at_a_time_are_all_answered_in_order(runs: Path) -> None:
    questions = ["3142", "4321", "12", "21", "1324"]
    with opened("mine", ["rollout.max_sessions=2"]) as model, ModelSessions(model) as sessions:
        found = sessions.answers(sessions.prompts(questions), samples=1)
    assert [each.prompt.question for each in found] == questions


def test_an_evaluation_has_figures_by_source_and_examples(runs: Path) -> None:
    found = evaluate_model("mine", data=["task:sort", "task:reverse"], num_prompts=6, samples=2, examples=1)
    assert (found.num_prompts, found.samples, len(found.examples)) == (6, 2, 1)
    assert {"all/acc/mean@2", "sort/acc/best@2", "reverse/acc/greedy"} <= set(found.figures)


def test_figures_over_all_sources_are_left_out_for_one() -> None:
    assert list(named_figures([Answer("p", "s", 1.0, {}, "x", is_greedy=True)])) == ["s/reward/greedy"]


def test_eval_sample_and_chat_answer_from_the_command_line(runs: Path) -> None:
    cli = CliRunner()
    result = cli.invoke(app, ["eval", "mine", "--prompts", "4", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_prompts"] == 4
    result = cli.invoke(app, ["sample", "mine", "--prompt", "3142", "--prompt", "1", "--greedy", "--json"])
    assert [each["prompt"] for each in json.loads(result.stdout)] == ["3142", "1"]
    result = cli.invoke(app, ["chat", "mine", "--greedy"], input="3142\n12\n\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("> ") == 3


def test_an_exported_checkpoint_loads_with_transformers(runs: Path) -> None:
    result = CliRunner().invoke(app, ["export", "mine", "--to", "hf", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    loaded = AutoModelForCausalLM.from_pretrained("hf")
    original = AutoModelForCausalLM.from_pretrained("runs/mine/model")
    assert loaded.dtype == torch.bfloat16
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    assert AutoTokenizer.from_pretrained("hf").chat_template
    result = CliRunner().invoke(app, ["export", "mine", "--to", "hf"])
    assert result.exit_code == 2
    assert "name a new folder" in result.output


def test_an_export_that_is_interrupted_leaves_no_half(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "add_tokenizer", interrupted)
    (tmp_path / "models").mkdir()
    with pytest.raises(KeyboardInterrupt):
        saved_actor("mine").export(tmp_path / "models" / "hf")
    assert list((tmp_path / "models").iterdir()) == []
