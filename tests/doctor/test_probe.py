"""Problems that only show when things are loaded: tokenizer, rows, reward, vocabularies, engines, devices, packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic
from tqppo.doctor.probe import probe


def probed(*sets: str, preset: str | None = "quickstart") -> list[Diagnostic]:
    compilation = compile_config(preset, [], ["storage.budget_gb=0.01", *sets], {})
    assert compilation.ok
    return probe(compilation)


def codes(found: list[Diagnostic]) -> list[str]:
    return [each.code for each in found]


def test_the_quickstart_has_all_that_it_needs() -> None:
    assert probed() == []


def test_rows_and_reward_of_a_file_are_tried(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    row = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    rows.write_text(f"{json.dumps(row)}\n" * 40)
    assert codes(probed(f"data.train={rows}")) == []
    (found,) = probed(f"data.train={rows}", "data.prompt_key=question")
    assert (found.code, found.key) == ("E602", "data.train")
    assert found.span is not None
    assert found.span.source == "--set"


def test_a_missing_file_and_an_overlong_prompt_are_reported(tmp_path: Path) -> None:
    assert codes(probed(f"data.train={tmp_path / 'none.jsonl'}")) == ["E602"]
    assert codes(probed("data.max_prompt_tokens=2")) == ["E602"]


def test_a_reward_that_the_reference_itself_does_not_earn_is_suspicious(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def never(data_source, solution_str, ground_truth, extra_info=None):\n    return 0\n"
    )
    found = probed(f"reward.function={tmp_path}/mine.py:never")
    assert codes(found) == ["W604", "W604"]
    (tmp_path / "bad.py").write_text(
        "def broken(data_source, solution_str, ground_truth, extra_info=None):\n    1 / 0\n"
    )
    assert set(codes(probed(f"reward.function={tmp_path}/bad.py:broken"))) == {"E603"}


def test_the_agent_loop_and_its_tools_are_imported(tmp_path: Path) -> None:
    (tmp_path / "tools_of_probe.py").write_text("def add(a: int) -> int:\n    return a\n\ndef bare(a):\n    return a\n")
    path = f"{tmp_path}/tools_of_probe.py"
    assert codes(probed("rollout.agent=tools", f'rollout.agent_args.tools=["{path}:add"]')) == []
    (found,) = probed("rollout.agent=tools", f'rollout.agent_args.tools=["{path}:bare"]')
    assert (found.code, found.key) == ("E611", "rollout.agent_args")
    assert "argument 'a' has no annotation" in found.message
    (found,) = probed("rollout.agent=no_such_module:Loop")
    assert "cannot be imported" in found.message


def test_vocabularies_of_student_and_teacher_are_compared(tiny_model: Path, tmp_path: Path) -> None:
    teacher = ("mode=distill", "warm_start.steps=0")
    same = [each for each in probed(*teacher, f"teachers.t.path={tiny_model}") if each.severity == "error"]
    assert same == []
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (found,) = probed(*teacher, f"teachers.t.path={other}")
    assert found.code == "E605"
    assert "disagree on 2 tokens" in found.message
    assert "'A' is token 32 for the student and token 33 for the teacher" in found.found
    assert codes(probed(*teacher, f"teachers.t.path={other}", "distillation.check_vocabulary=false")) == []


def test_a_model_that_does_not_exist_is_reported_at_its_path(tmp_path: Path) -> None:
    (found,) = probed("model.path=/nowhere/model")
    assert (found.code, found.key) == ("E601", "model.path")


def test_engines_that_do_not_exist_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TQPPO_ENGINES", str(tmp_path))
    assert codes(probed("rollout.backend=sglang")) == ["E606"]
    assert codes(probed("rollout.backend=vllm", 'rollout.endpoints=["http://127.0.0.1:9"]')) == ["E606"]


def test_devices_and_packages_are_counted() -> None:
    import torch

    asked = torch.cuda.device_count() + 1
    assert codes(probed(f"cluster.gpus_per_node={asked}")) == ["E607"]


def test_fake_gpus_count_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQPPO_FAKE_GPUS", "2")
    assert "E607" not in codes(probed("cluster.gpus_per_node=2"))
    assert "E607" in codes(probed("cluster.gpus_per_node=3"))


def test_a_reference_that_holds_tests_need_not_score_as_an_answer(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Add one.", "answer": ["assert f(1) == 2"]}\n' * 40)
    assert codes(probed(f"data.train={rows}", "reward.function=code", "warm_start.steps=0")) == []


def test_the_storage_budget_is_compared_with_the_free_memory(tmp_path: Path) -> None:
    (found,) = probed("storage.budget_gb=1e9")
    assert found.code == "W610"
    assert codes(probed(f"storage.dir={tmp_path}/none")) == ["E609"]
