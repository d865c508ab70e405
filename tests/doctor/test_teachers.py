"""Teachers are tried on their real engines before a run: the student answers, they score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.doctor import teachers
from tqppo.doctor.probe import probe
from tqppo.errors import EngineError
from tqppo.protocols import Scores
from tqppo.tiny.teachers import TaskSplit
from tqppo.tiny.tokenizer import byte_tokenizer

SMALL = ("warm_start.steps=0", "model.hidden_size=32", "model.num_layers=1", "storage.budget_gb=0.01")
OWN_PROMPT = 'teachers.self.prompt="{prompt} is {answer}"'


def config_of(*sets: str, preset: str = "base-tiny") -> Config:
    compilation = compile_config(preset, [], ["mode=distill", *SMALL, *sets], {})
    assert compilation.ok, compilation.diagnostics
    return compilation.draft


@pytest.mark.parametrize("loss", ["k3", "forward_kl_topk", "reverse_kl"])
def test_a_self_teacher_without_a_prompt_of_its_own_agrees_with_the_student(loss: str) -> None:
    config = config_of("teachers.self.path=student", f"distillation.loss={loss}")
    (trial,) = teachers.try_teachers(config, byte_tokenizer())
    assert (trial.name, trial.rows) == ("self", 2)
    assert 2 <= trial.tokens <= 2 * config.rollout.max_new_tokens
    assert trial.divergence == pytest.approx(0.0, abs=1e-5)


def test_a_privileged_prompt_makes_the_teacher_differ() -> None:
    (trial,) = teachers.try_teachers(config_of("teachers.self.path=student", OWN_PROMPT), byte_tokenizer())
    assert abs(trial.divergence) > 1e-5


def test_each_teacher_gets_rows_of_its_own(tiny_model: Path) -> None:
    config = config_of(
        'data.train=["task:sort", "task:reverse"]',
        "teachers.a.path=student",
        'teachers.a.match=["reverse"]',
        f"teachers.b.path={tiny_model}",
        'teachers.b.match=["sort"]',
    )
    assert [each.source for each in teachers.prompts_of(config, byte_tokenizer(), "a")] == ["reverse"] * 2
    assert [each.name for each in teachers.try_teachers(config, byte_tokenizer())] == ["a", "b"]


def test_the_probe_tells_the_divergence_and_reports_an_engine_that_fails(tiny_model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    sets = ["mode=distill", *SMALL]
    good = compile_config("base-tiny", [], [*sets, f"teachers.t.path={tiny_model}"], {})
    assert probe(good, told.append) == []
    assert told[-1].startswith("teacher t scored")
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / file.name).write_text(file.read_text())
    empty = compile_config("base-tiny", [], [*sets, f"teachers.t.path={tmp_path}"], {})
    (problem,) = probe(empty)
    assert (problem.code, problem.key) == ("E611", "teachers.t.path")


def test_a_task_teacher_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQPPO_TEACHERS", str(tmp_path))
    config = config_of("teachers.t.path=task:sort")
    asked: list[str] = []

    def make(task: str, recipe: object, rows: TaskSplit, folder: Path, report: object) -> str:
        asked.append(f"{task} in {folder}")
        return str(tmp_path)

    monkeypatch.setattr(teachers, "make_teacher", make)
    assert teachers.teacher_engine(config, "t", "student", tmp_path).model == str(tmp_path)
    assert asked == [f"sort in {tmp_path}"]


def test_scores_that_differ_or_are_no_numbers_are_refused() -> None:
    def scores(*values: float) -> Scores:
        top = np.zeros((len(values), 0))
        return Scores(np.array(values, np.float32), top.astype(np.int32), top.astype(np.float32))

    teachers._compare("t", scores(5.0, -1.0), scores(0.0, -1.0), start=1)
    with pytest.raises(EngineError, match=r"differently: by up to 0\.5"):
        teachers._compare("t", scores(-1.0, -1.0), scores(-1.0, -1.5), start=0)
    with pytest.raises(EngineError):
        teachers._compare("t", scores(float("nan"), 0), scores(float("nan"), 0), start=0)
