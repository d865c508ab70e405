"""Prompts and the sampler: every format, every mistake named, and a cursor that comes back exactly."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tqppo.data import prompts
from tqppo.data.dataset import Keys, load
from tqppo.data.prompts import DataSpec, Prompt, PromptSet, Sampler
from tqppo.errors import CheckpointError, DataError, PreflightError, UsageError
from tqppo.tiny.tokenizer import byte_tokenizer

VERL = {
    "prompt": [{"role": "user", "content": "2+2?"}],
    "data_source": "openai/gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def _jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _sampler(tokenizer: Any, **spec: Any) -> Sampler:
    return Sampler(prompts.load(DataSpec(**spec), tokenizer, seed=3))


def test_a_task_prompt_is_rendered_by_the_chat_template(tokenizer: Any) -> None:
    prompt = prompts.load(DataSpec(), tokenizer, seed=0).prompt(5)
    problem = prompt.messages[0]["content"]
    assert prompt.text == f"<|user|>{problem}<|assistant|>"
    assert tokenizer.decode(prompt.tokens) == prompt.text
    assert len(prompt.tokens) == 2 + 4
    assert (prompt.answer, prompt.source) == ("".join(sorted(problem)), "sort")


def test_verl_rows_and_parquet_and_jsonl_agree(tokenizer: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    rows = [load(str(file)).row(0) for file in (tmp_path / "a.parquet", _jsonl(tmp_path / "a.jsonl", [VERL]))]
    assert rows[0] == rows[1]
    assert (rows[0].answer, rows[0].source) == ("4", "openai/gsm8k")
    assert rows[0].extra == {"ability": "math", "split": "train", "index": 7}


def test_trl_rows_keep_their_further_columns_and_are_named_after_their_file(tokenizer: Any, tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "sums.jsonl", [{"prompt": "2+2?", "solution": "4", "level": 1}])
    spec = DataSpec(train=str(file), answer_key="solution", system_prompt="Be brief.")
    prompt = prompts.load(spec, tokenizer, seed=0).prompt(0)
    assert prompt.text == "<|system|>Be brief.<|user|>2+2?<|assistant|>"
    assert (prompt.answer, prompt.source, prompt.extra) == ("4", "sums", {"level": 1})


def test_plain_text_without_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [{"prompt": "Once upon", "answer": ""}])
    spec = DataSpec(train=str(file), answer_key="answer", chat_template=False)
    assert prompts.load(spec, tokenizer, seed=0).prompt(0).text == "Once upon"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "answer": 1}', "{oops"], r"a\.jsonl:2: not valid JSON"),
        (['{"prompt": "a", "answer": 1}', "", "[1]"], r"a\.jsonl:3: expected a JSON object"),
        (['{"text": "a", "answer": 1}'], r"a\.jsonl:1: no column looks like a prompt; columns here: text, answer"),
        (['{"prompt": "a"}'], r"a\.jsonl:1: no column 'answer'.*data\.answer_key"),
        (['{"prompt": 7, "answer": 1}'], r"a\.jsonl:1: column 'prompt' should be text or a list of chat messages"),
        ([""], r"a\.jsonl has no rows"),
    ],
)
def test_a_bad_line_is_named_when_the_file_is_loaded(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / "a.jsonl"), keys=Keys(answer="answer"))


def test_what_is_not_there_says_what_to_write(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"sort does not exist \(a procedural task is written task:NAME\)"):
        load("sort")
    with pytest.raises(UsageError, match="no dataset 'no_such'"):
        load("gym:no_such")
    (tmp_path / "a.xlsx").write_text("a")
    with pytest.raises(DataError, match=r"expected \.jsonl"):
        load(str(tmp_path / "a.xlsx"))
    (tmp_path / "a.parquet").write_text("a")
    with pytest.raises(DataError, match="not a parquet file"):
        load(str(tmp_path / "a.parquet"))
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(PreflightError, match=r"data\.chat_template = false"):
        prompts.load(DataSpec(), bare, seed=0)


def test_reasoning_gym_rows_are_split_and_repeatable() -> None:
    trained = load("gym:basic_arithmetic", size=40, seed=1)
    held_out = load("gym:basic_arithmetic", size=40, seed=1, held_out=True)
    assert trained.row(3) == load("gym:basic_arithmetic", size=40, seed=1).row(3)
    assert not {trained.row(i).prompt for i in range(40)} & {held_out.row(i).prompt for i in range(40)}
    json.dumps(trained.row(0).extra)


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": text} for text in "ab"]
    files = [str(_jsonl(tmp_path / f"{name}.jsonl", rows)) for name in ("x", "y")]
    joined = load([*files, "task:sort"], size=5, keys=Keys(answer="answer"))
    assert len(joined) == 9
    assert [joined.row(i).source for i in range(9)] == ["x", "x", "y", "y", *["sort"] * 5]
    assert joined.where(3).endswith("y.jsonl:2")


def test_an_epoch_sees_every_row_once_and_runs_into_the_next(tokenizer: Any) -> None:
    sampler = _sampler(tokenizer, size=10)
    drawn = [prompt for _ in range(5) for prompt in sampler.next_batch(4)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(prompt.index for prompt in first) == sorted(prompt.index for prompt in second) == list(range(10))
    assert [prompt.index for prompt in first] != [prompt.index for prompt in second]
    assert len({prompt.uid for prompt in drawn}) == 20
    assert not any("_" in prompt.uid for prompt in drawn)
    assert sampler.epoch == 1


def test_a_dataset_smaller_than_the_batch_is_repeated(tokenizer: Any) -> None:
    batch = _sampler(tokenizer, size=3).next_batch(8)
    assert [prompt.uid.split("-")[1] for prompt in batch] == list("00011122")


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 6, 11])
def test_a_restored_sampler_goes_on_exactly(tokenizer: Any, taken: int) -> None:
    whole = _sampler(tokenizer, size=17)
    for _ in range(taken):
        whole.next_batch(3)
    state = json.loads(json.dumps(whole.state()))
    again = _sampler(tokenizer, size=17)
    again.restore(state)
    assert [whole.next_batch(5) for _ in range(9)] == [again.next_batch(5) for _ in range(9)]
    assert whole.state() == again.state()


def test_resume_at_the_end_of_an_epoch_trains_on_the_next(tokenizer: Any) -> None:
    whole = _sampler(tokenizer, size=8)
    whole.next_batch(8)
    again = _sampler(tokenizer, size=8)
    again.restore(whole.state())
    assert {prompt.uid.split("-")[1] for prompt in again.next_batch(4)} == {"1"}


def test_order_depends_on_the_seed_and_on_shuffle(tokenizer: Any) -> None:
    def order(seed: int, shuffle: bool = True) -> list[int]:
        spec = DataSpec(size=50, shuffle=shuffle)
        return [each.index for each in Sampler(prompts.load(spec, tokenizer, seed=seed)).next_batch(50)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == list(range(50))


def test_changed_data_refuse_the_checkpoint(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": text} for text in "abc"]
    file = _jsonl(tmp_path / "a.jsonl", rows)
    state = _sampler(tokenizer, train=str(file), answer_key="answer").state()
    _jsonl(file, rows[:2])
    with pytest.raises(CheckpointError, match="the training data changed"):
        _sampler(tokenizer, train=str(file), answer_key="answer").restore(state)


def _long(tmp_path: Path, tokenizer: Any, overlong: Any) -> PromptSet:
    rows = [{"prompt": "x" * length, "answer": ""} for length in (3, 50, 5, 60)]
    file = _jsonl(tmp_path / "a.jsonl", rows)
    spec = DataSpec(str(file), answer_key="answer", max_prompt_tokens=20, overlong=overlong, shuffle=False)
    return prompts.load(spec, tokenizer, seed=0)


def test_long_prompts_are_refused_with_file_and_line(tokenizer: Any, tmp_path: Path) -> None:
    found = _long(tmp_path, tokenizer, "error")
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt has 52 tokens, data\.max_prompt_tokens is 20"):
        found.check()
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        Sampler(found).next_batch(2)


def test_long_prompts_are_left_out_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    found = _long(tmp_path, tokenizer, "drop")
    sampler = Sampler(found)
    assert [prompt.index for prompt in sampler.next_batch(4)] == [0, 2, 0, 2]
    assert sampler.metrics()["data/dropped_prompts"] == 3  # 1 and 3, and 1 again on the way to the second 2
    assert [prompt.index for prompt in found.first(10)] == [0, 2]


def test_long_prompts_keep_their_last_tokens_and_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    sampler = Sampler(_long(tmp_path, tokenizer, "truncate"))
    batch = sampler.next_batch(4)
    assert [len(prompt.tokens) for prompt in batch] == [5, 20, 7, 20]
    assert batch[1].text == "x" * 19 + "<|assistant|>"
    assert sampler.metrics()["data/truncated_prompts"] == 2


def test_nothing_short_enough_is_an_error_and_not_a_loop(tokenizer: Any, tmp_path: Path) -> None:
    spec = DataSpec(size=20, max_prompt_tokens=3, overlong="drop")
    with pytest.raises(DataError, match="every prompt is longer"):
        Sampler(prompts.load(spec, tokenizer, seed=0)).next_batch(1)
    with pytest.raises(DataError, match="no prompt is within"):
        prompts.load(spec, tokenizer, seed=0).first(4)


def test_a_large_task_costs_nothing_until_it_is_read(tokenizer: Any) -> None:
    found = prompts.load(DataSpec(size=100_000_000), tokenizer, seed=0)
    assert found.prompt(99_999_999).index == 99_999_999
    assert len(found.fingerprint()) == 16


def test_the_spec_comes_from_the_config_section() -> None:
    from tqppo.config.sections import DataSection

    section = DataSection(train="task:add", task_args={"digits": 1}, size=7, overlong="drop")
    spec = DataSpec.of(section)
    assert (spec.train, spec.task_args, spec.size, spec.overlong) == ("task:add", {"digits": 1}, 7, "drop")


def test_validation_takes_the_held_out_part_or_the_files_it_is_given(tokenizer: Any, tmp_path: Path) -> None:
    file = str(_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b"}]))
    spec = DataSpec(train=["task:sort", file], size=30, answer_key="answer")
    own = prompts.for_validation(spec, tokenizer, seed=0)
    assert own is not None
    assert len(own) == 30
    trained = {prompts.load(spec, tokenizer, seed=0).prompt(i).answer for i in range(30)}
    assert not trained & {prompt.answer for prompt in own.first(30)}
    assert own.first(1)[0].uid.startswith("v")
    given = prompts.for_validation(spec, tokenizer, seed=0, sources=file)
    assert given is not None
    assert [prompt.answer for prompt in given.first(5)] == ["b"]
    assert prompts.for_validation(DataSpec(train=file, answer_key="answer"), tokenizer, seed=0) is None


def test_none_of_this_imports_torch() -> None:
    names = [
        "data.tasks",
        "data.dataset",
        "data.prompts",
        "rewards.scorer",
        "metrics.validation",
        "metrics.files",
        "display.display",
    ]
    names += ["metrics.trackers"]
    code = "import sys; " + "; ".join(f"import tqppo.{name}" for name in names) + "; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_demonstrations_are_training_rows_with_their_answers() -> None:
    found = prompts.demonstrations(DataSpec(size=4), seed=0)
    assert len(found) == 4
    messages, answer = found[3]
    assert "".join(sorted(messages[0]["content"])) == answer
    assert len(list(found)) == 4


def test_a_further_column_is_found_by_its_name_or_path() -> None:
    prompt = Prompt("p0", 0, [1], None, "s", {"topic": "math", "meta": {"level": {"name": "hard"}}}, "1")
    assert prompt.column("topic") == prompt.column("extra_info.topic") == "math"
    assert prompt.column("meta.level.name") == "hard"
    assert prompt.column("meta.other") is prompt.column("topic.x") is prompt.column("none") is None


def test_validation_takes_as_many_prompts_of_each_source(tokenizer: Any, tmp_path: Path) -> None:
    few = _jsonl(tmp_path / "few.jsonl", [{"prompt": "a", "answer": "b"}])
    spec = DataSpec(train=["task:sort", str(few), "task:reverse"], answer_key="answer", size=50)
    found = prompts.load(spec, tokenizer, seed=0).first(7)
    assert [prompt.source for prompt in found] == ["sort", "few", "reverse", "sort", "reverse", "sort", "reverse"]
    assert len({prompt.uid for prompt in found}) == 7


def test_messages_that_a_template_cannot_render_are_named_with_their_row(tokenizer: Any, tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% for message in messages %}{{ '<u>' + message.content }}{% endfor %}"
    path = _jsonl(tmp_path / "a.jsonl", [{"prompt": parts, "answer": "4"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the model's chat template cannot render the messages: TypeError"):
        prompts.load(DataSpec(train=str(path)), strict, seed=0).check()
    plain = prompts.load(DataSpec(train=str(path), chat_template=False), tokenizer, seed=0).prompt(0)
    assert plain.text == "2+2?"


@pytest.mark.parametrize("change", [{"position": 10**9}, {"position": -1}, {"epoch": -3}])
def test_a_place_that_is_not_in_the_data_is_refused(tokenizer: Any, change: dict[str, int]) -> None:
    sampler = _sampler(tokenizer, size=10)
    state: Any = {**sampler.state(), **change}
    with pytest.raises(CheckpointError, match="the checkpoint's place in the data is not there"):
        sampler.restore(state)
