"""Mistakes of a first hour, in files of one's own and on the command line: exit code, message, what to do, time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app

MOST_SECONDS = 3.0  # of this process: others may have the cores
CONFIG = """
extends = "base-tiny"

[data]
train = "rows.jsonl"
batch_size = 2
max_prompt_tokens = 64

[reward]
function = "rewards.py:grade"

[validation]
data = "rows.jsonl"
"""
REWARDS = """
def grade(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

def column(completions, tests, **columns):
    return [1.0 for _ in completions]

def key(completions, **columns):
    return [columns["answers"][0]]

def count(completions, **columns):
    return [1.0, 2.0, 3.0]

def words(completions, **columns):
    return ["good" for _ in completions]

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    pass

def bare():
    return 1.0

def leaves(completions, **columns):
    raise SystemExit(3)

class Judge:
    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]
"""
FILES = {
    "mine.toml": CONFIG,
    "rewards.py": REWARDS,
    "lacks.py": "import no_such_package\n",
    "typo.py": "def grade(:\n",
    "rows.jsonl": '{"question": "2+2?", "answer": "4"}\n{"question": "3+4?", "answer": "7"}\n',
    "cut.jsonl": '{"question": "a", "answer": "4"}\n{"question": "b", "ans\n',
    "odd.jsonl": '{"id": "1", "text": "1+1?", "answer": "2"}\n',
    "no-text.jsonl": '{"conversations": [{"from": "human", "value": "hi"}]}\n',
    "no-answer.jsonl": '{"question": "1+1?"}\n',
    "null.jsonl": '{"question": "1+1?", "answer": null}\n',
    "later.jsonl": '{"question": "a", "answer": "1"}\n{"answer": "2"}\n',
    "number.jsonl": '{"question": 5, "answer": "1"}\n',
    "list.jsonl": "[1, 2]\n",
    "empty.jsonl": "",
    "semicolons.csv": "question;answer\n1+1?;2\n",
    "long.jsonl": json.dumps({"question": "why? " * 40, "answer": "1"}) + "\n",
    "notes.txt": "hello\n",
    "broken.toml": "[data\ntrain = 3\n",
}
TRAIN = ("train", "--config", "mine.toml", "--in-process")


@dataclass(frozen=True)
class Mistake:
    """What is typed, the exit code, and what the message must contain: what is wrong, and what to do."""

    words: tuple[str, ...]
    code: int
    says: tuple[str, ...]


def train(setting: str, *says: str, code: int = 4) -> Mistake:
    """A setting that only shows to be wrong when it is tried: the message has its place and a fix."""
    return Mistake((*TRAIN, "--set", setting), code, (*says, "--> --set:1:", "= fix: "))


def reward(function: str, *says: str) -> Mistake:
    command = f"= fix: correct it, then try it: tqppo reward try {function} --data rows.jsonl"
    return train(f"reward.function={function}", "error[E603]", *says, command)


def data(file: str, *says: str) -> Mistake:
    return train(f"data.train={file}", "error[E602]", file, *says, f"look at its rows: tqppo data show {file}")


MISTAKES = {
    # rewards
    "reward-unknown-name": train("reward.function=exact", 'did you mean "exact_match"?', code=3),
    "reward-without-function": train("reward.function=rewards.py", '"rewards.py:function"', code=3),
    "reward-misspelt": reward("rewards.py:grad", "has no function 'grad'; did you mean 'grade'?"),
    "reward-of-no-name-like-it": reward("rewards.py:zzz", "it has grade, column, key"),
    "reward-file-missing": reward("reward.py:grade", "there is no file"),
    "reward-module-missing": reward("no_such_module:grade", "cannot import no_such_module"),
    "reward-import-missing": reward("lacks.py:grade", "No module named 'no_such_package'"),
    "reward-syntax": reward("typo.py:grade", "invalid syntax (typo.py, line 1)"),
    "reward-column": reward("rewards.py:column", "asks for column 'tests', and rows have answer"),
    "reward-key": reward("rewards.py:key", "KeyError: 'answers'", "rewards.py:9)"),
    "reward-count": reward("rewards.py:count", "should return a list of 1 scores"),
    "reward-words": reward("rewards.py:words", "its score is 'good', which is not a finite number"),
    "reward-none": reward("rewards.py:nothing", "its score is None"),
    "reward-signature": reward("rewards.py:bare", "cannot be called as f(data_source, solution_str"),
    "reward-exits": reward("rewards.py:leaves", "its process died (exit code 3)"),
    "reward-class": reward("rewards.py:Judge", "is a class: name an instance"),
    "reward-argument-missing": reward("matches", "needs reward.function_args = { pattern = … }"),
    "reward-without-tests": reward("code", "nothing in the test can fail; write asserts, not '4'"),
    # data
    "data-missing": data("row.jsonl", "does not exist", "in that folder: "),
    "data-cut": data("cut.jsonl", "cut.jsonl:2: not valid JSON"),
    "data-odd-columns": data("odd.jsonl", 'such as data.prompt_key = "text"'),
    "data-without-text": data("no-text.jsonl", "add a column with text, or with chat messages"),
    "data-without-answer": data("no-answer.jsonl", 'data.answer_key = "" if your reward needs none'),
    "data-null-answer": data("null.jsonl", "column 'answer' is null"),
    "data-later-row": data("later.jsonl", "later.jsonl:2: no column 'question'"),
    "data-number": data("number.jsonl", "should be text or a list of chat messages, not 5"),
    "data-list": data("list.jsonl", "expected a JSON object with columns, found [1, 2]"),
    "data-empty": data("empty.jsonl", "has no rows"),
    "data-semicolons": data("semicolons.csv", "separate the columns by commas: here ';' does"),
    "data-too-long": data("long.jsonl", "raise it, or set data.overlong"),
    "data-no-such-pattern": train("data.train=z*.jsonl", "no file matches z*.jsonl"),
    "data-unknown-format": train("data.train=notes.txt", "convert it to JSONL or parquet", code=3),
    "task-unknown": train("data.train=task:zzz", "write one of them, or the path of a file", code=3),
    # models, engines, devices
    "model-missing": train("model.path=no/where", "error[E601]", "that this machine has network"),
    "engine-unknown": train("rollout.backend=vlm", 'did you mean "vllm"?', code=3),
    "engine-python": Mistake(
        ("train", "--config", "mine.toml", "rollout.backend=vllm", "rollout.python=/no/python"),
        4,
        ("error[E606]", "there is no such interpreter", "= fix: On a CPU: `tqppo backends install vllm`."),
    ),
    "lora-target": train("model={lora_rank = 4, lora_targets = ['q_pro']}", "error[E622]", 'did you mean "q_proj"?'),
    "gpu": Mistake(
        ("train", "--config", "mine.toml", "cluster.gpus_per_node=1"), 4, ("error[E607]", "cluster.gpus_per_node = 0")
    ),
    # files and names
    "config-missing": Mistake(("train", "--config", "no.toml"), 3, ("error[E001]", "= fix: check the path")),
    "config-folder": Mistake(("train", "--config", "."), 3, ("error[E002]", "= fix: name a file in it")),
    "config-broken": Mistake(("train", "--config", "broken.toml"), 3, ("error[E006]", "--> broken.toml:1:", "= fix: ")),
    "config-is-data": Mistake(
        ("train", "--config", "rows.jsonl"), 3, ("1 error\n", 'name data in it: [data] train = "rows.jsonl"')
    ),
    "name-outside": Mistake((*TRAIN, "--name", "../x y"), 3, ("error[E435]", 'set run.name = "x-y"')),
    "name-taken": Mistake((*TRAIN, "--name", "taken"), 2, ("there is already a run at runs/taken", "--overwrite")),
    # the command line
    "nothing-to-run": Mistake(("train",), 2, ("--preset NAME", "tqppo presets list")),
    "steps-are-words": Mistake((*TRAIN, "--max-steps", "ten"), 2, ("'--max-steps'", "help: tqppo train --help")),
    "run-misspelt": Mistake(("resume", "takn"), 5, ('did you mean "taken"?',)),
    "run-unknown": Mistake(("runs", "show", "zzz"), 5, ("runs in runs/: taken",)),
    "eval-of-nothing": Mistake(("eval", "zzz"), 2, ("A model is a folder with config.json",)),
    "chat-with-nothing": Mistake(("chat", "zzz"), 2, ("A model is a folder with config.json",)),
    "export-of-nothing": Mistake(("export", "zzz", "--to", "hf"), 2, ("'zzz' is neither a checkpoint nor a run",)),
    "export-over-files": Mistake(("export", "taken", "--to", "runs"), 2, ("runs is there already",)),
    "sample-of-nothing": Mistake(("sample", "taken"), 2, ("missing option '--prompt'",)),
    "sample-below-zero": Mistake(("sample", "taken", "--prompt", "1", "-t", "-1"), 2, ("'-t'", "tqppo sample --help")),
    "rm-of-a-part": Mistake(("runs", "rm", "runs/taken/checkpoints"), 2, ("tqppo runs rm taken",)),
    "explain-a-setting": Mistake(("explain", "actor.lr"), 2, ("tqppo config explain actor.lr",)),
    "explain-misspelt": Mistake(("config", "explain", "actr.lr"), 2, ("Did you mean actor.lr?",)),
    "explain-with-a-mistake": Mistake(("config", "explain", "--set", "actor.lr=inf"), 3, ("write a finite number",)),
    "try-without-rows": Mistake(("reward", "try", "gsm8k"), 2, ("--data FILE",)),
    "data-without-verb": Mistake(("data", "rows.jsonl"), 2, ("write tqppo data show rows.jsonl",)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = tmp_path / "runs" / "taken"
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    (run / "config.resolved.toml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    return tmp_path


def test_there_are_sixty() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_before_anything_starts(name: str, folder: Path) -> None:
    mistake = MISTAKES[name]
    begun = time.process_time()
    found = CliRunner().invoke(app, list(mistake.words))
    assert time.process_time() - begun < MOST_SECONDS
    assert found.exit_code == mistake.code, found.output
    assert "Traceback" not in found.output
    for text in mistake.says:
        assert text in found.output
    assert [each.name for each in (folder / "runs").iterdir()] == ["taken"]
