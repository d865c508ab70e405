"""Vocabularies read from tokenizer files, and what differs between two of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tqppo.config.compile import compile_config
from tqppo.config.read.vocabulary import Vocabulary, differences, vocabulary_of


def test_a_vocabulary_is_that_of_the_loaded_tokenizer(tiny_model: Path) -> None:
    found = vocabulary_of(str(tiny_model))
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert dict(found.ids) == tokenizer.get_vocab()
    assert found.end == tokenizer.eos_token
    assert found.special >= set(tokenizer.all_special_tokens)


def test_a_changed_file_is_read_again(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    before = vocabulary_of(str(folder))
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    after = vocabulary_of(str(folder))
    assert before is not None
    assert after is not None
    assert before.fingerprint != after.fingerprint
    assert [each.token for each in differences(before, after)] == ["A", "B"]


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["▁a", -1.5]]}}))
    found = vocabulary_of(str(tmp_path))
    assert found is not None
    assert found.ids == {"<unk>": 0, "▁a": 1}


def test_a_hub_name_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert vocabulary_of("org/name") is None
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc\n")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    found = vocabulary_of("org/name")
    assert found is not None
    assert found.ids == {"a": 0}


def test_what_cannot_be_read_is_not_compared(tmp_path: Path) -> None:
    assert vocabulary_of(str(tmp_path)) is None
    for broken in ("", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "x"}}}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        assert vocabulary_of(str(tmp_path)) is None


def test_the_lowest_differing_ids_come_first_and_special_tokens_count() -> None:
    own = Vocabulary({"a": 0, "b": 1, "c": 2, "<s>": 3}, frozenset({"<s>"}), "<s>")
    other = Vocabulary({"a": 0, "c": 1, "d": 2, "<s>": 3}, frozenset(), "<s>")
    assert [str(each) for each in differences(own, other)] == [
        "'b' is token 1 for the student and missing for the teacher",
        "'c' is token 2 for the student and token 1 for the teacher",
        "'d' is missing for the student and token 2 for the teacher",
        "'<s>' is special in one of them only",
    ]
    assert differences(own, own) == []


def test_a_teacher_with_other_tokens_is_refused_unless_the_check_is_off(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(tiny_model, folder)
    sets = ["mode=distill", f"model.path={tiny_model}", f"teachers.t.path={folder}"]
    assert compile_config(None, [], sets, {}).diagnostics == []
    text = (folder / "tokenizer.json").read_text().replace("<|tool|>", "<|toll|>")
    (folder / "tokenizer.json").write_text(text)
    (problem,) = compile_config(None, [], sets, {}).diagnostics
    assert (problem.code, "'<|tool|>'" in problem.found) == ("E511", True)
    assert compile_config(None, [], [*sets, "distillation.check_vocabulary=false"], {}).diagnostics == []
