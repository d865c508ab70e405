"""Datasets made from local copies, read back as training reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tqppo.data.dataset import load
from tqppo.data.make import download, local_files, make_files
from tqppo.data.recipes import RECIPES, command_for
from tqppo.errors import DataError, PreflightError
from tqppo.rewards.code import read_tests


def jsonl(path: Path, *rows: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_from_a_folder_of_parquet_files_becomes_rows_for_training(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "main"
    copy.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"question": f"{split}: 2 + 2?", "answer": "2 and 2 is 4.\n#### 1,004"}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), copy / f"{split}-00000-of-00001.parquet")
    made = make_files(RECIPES["gsm8k"], [tmp_path / "copy"], tmp_path / "out")
    assert made == {tmp_path / "out" / "train.parquet": 1, tmp_path / "out" / "test.parquet": 1}
    row = load(str(tmp_path / "out" / "train.parquet")).row(0)
    assert (row.answer, row.source) == ("1004", "openai/gsm8k")
    assert isinstance(row.prompt, list)
    assert str(row.prompt[0]["content"]).startswith("train: 2 + 2?\n\n")


def test_rows_that_have_the_columns_already_are_kept_once_each(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "data_source": "math_dapo"}
    row |= {"reward_model": {"ground_truth": "2", "style": "rule-lighteval"}, "ability": "MATH"}
    copy = jsonl(tmp_path / "dapo-math-17k.jsonl", row, row, row)
    made = make_files(RECIPES["dapo-math"], [copy], tmp_path / "out")
    assert made == {tmp_path / "out" / "train.parquet": 1}
    read = load(str(tmp_path / "out" / "train.parquet")).row(0)
    assert (read.answer, read.source) == ("2", "math_dapo")


def test_answers_of_math_are_what_the_last_box_holds(tmp_path: Path) -> None:
    rows = [
        {"problem": "Half of a half?", "solution": "First \\boxed{1}, then \\boxed{\\frac{1}{4}}."},
        {"problem": "Two?", "answer": "2"},
    ]
    make_files(RECIPES["math"], [jsonl(tmp_path / "math_train.jsonl", *rows)], tmp_path / "out")
    made = load(str(tmp_path / "out" / "train.parquet"))
    assert [made.row(i).answer for i in range(2)] == ["\\frac{1}{4}", "2"]


def test_code_shows_its_tests_and_its_reward_runs_them(tmp_path: Path) -> None:
    tests = ["assert f(1) == 3", "assert f(2) == 4"]
    row: dict[str, object] = {"text": "Add two.", "code": "def f(a): ...", "test_list": tests}
    make_files(RECIPES["code"], [jsonl(tmp_path / "mbpp.jsonl", row)], tmp_path / "out")
    read = load(str(tmp_path / "out" / "train.parquet")).row(0)
    assert read.source == "code"
    assert isinstance(read.prompt, list)
    assert "\n".join(tests) in str(read.prompt[0]["content"])
    assert isinstance(read.answer, str)
    assert [test.statements for test in read_tests(read.answer)] == tests


def test_a_file_whose_name_tells_no_split_belongs_where_the_dataset_says(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "aime-2024.jsonl", {"problem": "?", "answer": "1"})
    assert set(local_files([path], unnamed=RECIPES["aime-2024"].unnamed)) == {"test"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "2 + 2?", "answer": "4"}', 'train.jsonl:1: the answer to .* has no "####"'),
        ('{"text": "2 + 2?"}', "train.jsonl:1: a row has none of the columns question, only text"),
        ("[1]", "train.jsonl:1: expected a JSON object"),
        ("{", "train.jsonl:1: not valid JSON"),
        ("", "no rows"),
    ],
)
def test_a_copy_of_something_else_is_refused_with_its_place(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        make_files(RECIPES["gsm8k"], [tmp_path / "train.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_a_copy_that_is_not_there_and_a_box_that_never_closes() -> None:
    with pytest.raises(DataError, match="there is no"):
        local_files([Path("/nowhere/train.parquet")])
    with pytest.raises(DataError, match="not closed"):
        RECIPES["math"].convert({"problem": "?", "solution": "\\boxed{1"})


def test_notes_in_the_folder_of_a_dataset_are_no_data(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"question": "?", "answer": "#### 1"})
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert local_files([tmp_path]) == {"train": [tmp_path / "train.jsonl"]}


def test_a_row_of_code_without_tests_is_refused() -> None:
    with pytest.raises(DataError, match=r"'Add two\.' has no tests"):
        RECIPES["code"].convert({"text": "Add two.", "code": "def f(a): ...", "test_list": []})


def test_the_files_of_presets_have_a_command() -> None:
    assert command_for(Path("data/gsm8k/train.parquet")) == "tqppo data get gsm8k"
    assert command_for(Path("/big/data/math/test.parquet")) == "tqppo data get math --out /big/data/math"
    assert command_for(Path("data/mine/train.parquet")) == command_for(Path("train.parquet")) == ""


def test_without_a_hub_the_error_says_what_to_do() -> None:
    with pytest.raises(PreflightError, match=r"hf download openai/gsm8k --repo-type dataset(?s:.*)--from COPY"):
        download(RECIPES["gsm8k"])  # tests are offline
