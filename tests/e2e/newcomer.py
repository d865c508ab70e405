"""The first hour of a newcomer: a file, a reward and a config in a folder, five mistakes, then a model that answers.

It is a program of its own (`python tests/e2e/newcomer.py FOLDER`), because every command starts and ends its own Ray.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tqppo.cli import app

CONFIG = """
extends = "base-tiny"

[run]
name = "sums"
max_steps = 2

[data]
train = "{data}"
batch_size = 4
max_prompt_tokens = 64

[reward]
function = "{reward}"

[rollout]
group_size = 2

[actor]
lr = {lr}

[warm_start]
steps = 2

[validation]
data = "rows.jsonl"
num_prompts = 4
interval = 0
"""
REWARD = """
def grade(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

def broken(completions, **columns):
    return [columns["tests"][0]]
"""
MOST_SECONDS = 3.0  # of a command's processes, from the start to the message: others may have the cores


def write(folder: Path, *, data: str = "rows.jsonl", reward: str = "reward.py:grade", lr: str = "1e-3") -> None:
    (folder / "mine.toml").write_text(CONFIG.format(data=data, reward=reward, lr=lr))


def run(*words: str, code: int = 0, typed: str = "") -> str:
    result = CliRunner().invoke(app, list(words), input=typed)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def mistake(*words: str, code: int) -> tuple[str, float]:
    """What a command of its own prints, and the seconds that its processes computed."""
    before = seconds_of_children()
    done = subprocess.run([sys.executable, "-m", "tqppo", *words], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said, seconds_of_children() - before


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make_mistakes(folder: Path) -> None:
    rows = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "odd.jsonl").write_text('{"text": "1+1?", "answer": "2"}\n')
    (folder / "reward.py").write_text(REWARD)
    mistakes = [
        ({"lr": '"fast"'}, 3, "error[E103]"),
        ({"data": "row.jsonl"}, 4, "in that folder: odd.jsonl, rows.jsonl"),
        ({"data": "odd.jsonl"}, 4, 'data.prompt_key = "text"'),
        ({"reward": "reward.py:grad"}, 4, "reward.py has no function 'grad'"),
        ({"reward": "reward.py:broken"}, 4, "KeyError: 'tests'"),
    ]
    for change, code, message in mistakes:
        write(folder, **change)
        said, seconds = mistake("train", "--config", "mine.toml", code=code)
        assert message in said
        assert "= fix: " in said
        assert seconds < MOST_SECONDS, (message, seconds)
        print(f"{seconds:.1f} s: {message}")
    assert not (folder / "runs").exists()


def train_and_use(folder: Path) -> None:
    write(folder)
    said = run("train", "--config", "mine.toml")
    assert "data       9 rows" in said
    assert "sums, with 2 steps" in run("train", "--config", "mine.toml", code=2)
    assert json.loads(run("runs", "show", "sums", "--json"))["state"] == "finished"
    assert "sums, step 2: 4 prompts, 1 sampled and 1 greedy answer each" in run("eval", "sums", "--prompts", "4")
    assert run("chat", "sums", typed="1+1?\n\n").count("> ") == 2
    run("export", "sums", "--to", "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("hf"), AutoTokenizer.from_pretrained("hf")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1+1?"}], return_tensors="pt", return_dict=True)
    assert model.generate(**prompt, max_new_tokens=4).shape[0] == 1


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    make_mistakes(Path.cwd())
    train_and_use(Path.cwd())
