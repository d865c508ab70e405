"""A page of `docs/`: its files are written into a folder, its commands are run there.

A block of TOML or Python is a file if its first line is a comment with a file's name; one of JSON is `rows.jsonl`.
The lines of a block of `sh` are commands, of which all but their last comment counts.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.data.make import make_files
from tqppo.data.recipes import RECIPES

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# (\S+\.(?:toml|py))\n")


@dataclass(frozen=True)
class Page:
    text: str

    @classmethod
    def read(cls, name: str) -> Page:
        """A page by its path in the tree, such as `docs/agents.md`."""
        return cls((ROOT / name).read_text())

    def blocks(self, *kinds: str) -> list[str]:
        return [text for kind, text in BLOCK.findall(self.text) if kind in kinds]

    @property
    def files(self) -> dict[str, str]:
        found = [(NAME.match(text), text) for text in self.blocks("toml", "python")]
        return {name[1]: text[name.end() :] for name, text in found if name}

    @property
    def unused(self) -> list[str]:
        """Blocks that are no files, and files that no command and no other file names."""
        nameless = [text for text in self.blocks("toml", "python") if not NAME.match(text)]
        files, commands = self.files, "\n".join(self.commands)
        named = {name: "\n".join([commands, *(files[each] for each in files if each != name)]) for name in files}
        return nameless + [name for name, text in named.items() if name not in text]

    @property
    def commands(self) -> list[str]:
        joined = "\n".join(self.blocks("sh")).replace("\\\n", " ")
        lines = [re.sub(r"\s+# .*$", "", line).strip() for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("# ")]

    def commands_of(self, *starts: str) -> list[str]:
        return [each for each in self.commands if each.startswith(starts)]

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for rows in self.blocks("json"):
            (folder / "rows.jsonl").write_text(rows)


def run(command: str, *more: str, typed: str = "", code: int = 0) -> str:
    """What a command of tqppo prints; it must end with this exit code and without a warning."""
    program, *words = shlex.split(command)
    assert program == "tqppo", command
    answer = CliRunner().invoke(app, [*words, *more], input=typed)
    assert answer.exit_code == code, f"{command}\n{answer.output}"
    assert "warning[" not in answer.output, answer.output
    return answer.output


def without(options: Sequence[str], name: str) -> list[str]:
    """The options without one that has a value."""
    if name not in options:
        return list(options)
    place = options.index(name)
    return [*options[:place], *options[place + 2 :]]


def checked(command: str, *more: str) -> str:
    """What `validate-config` says of a command that trains."""
    program, name, *options = shlex.split(command)
    assert (program, name) in {("tqppo", "train"), ("tqppo", "validate-config")}, command
    options = [each for each in options if each not in ("--overwrite", "--no-probe")]
    return run(shlex.join(["tqppo", "validate-config", *without(without(options, "--name"), "--max-steps")]), *more)


COPIES = {
    "gsm8k": {"question": "2 + 2?", "answer": "#### 4"},
    "code": {"text": "Add two.", "test_list": ["assert f(1) == 3"]},
}


def make_data_of_presets(copies: Path, name: str) -> None:
    """Files where presets look for them, as `tqppo data get` makes them of copies: of one row each, or empty ones."""
    if name not in COPIES:
        Path(RECIPES[name].folder).mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            (Path(RECIPES[name].folder) / f"{split}.parquet").touch()
        return
    for split in ("train", "test"):
        copy = copies / name / f"{split}.jsonl"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(json.dumps(COPIES[name]) + "\n")
    make_files(RECIPES[name], [copies / name], Path(RECIPES[name].folder))


ELSEWHERE = ("pip", "python3", "ray", "docker", "make")  # what only a network, a cluster or a container can run
FEWER_STEPS = ("--set", "warm_start.steps=2", "--set", "validation.num_prompts=4")


def follow(command: str, *, may_train: bool = False) -> str:
    """Do what a page says, at the size of a test. Training on GPUs is only checked, and all of it unless it may run."""
    command = command.removeprefix("TQPPO_FAKE_GPUS=8 ")
    program, *words = shlex.split(command)
    if program in ELSEWHERE or words[:2] == ["backends", "install"]:
        return ""
    if program == "python":
        return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout
    if words[:2] == ["data", "get"]:
        make_data_of_presets(Path("copies"), words[2])
        return ""
    if words[0] == "train":
        plan = checked(command)
        on_this_machine = "engine   embedded" in plan and "GPUs:" not in plan
        return run(command, "--max-steps", "2", *FEWER_STEPS) if may_train and on_this_machine else plan
    return run(re.sub(r"--max-steps \d+", "--max-steps 3", command), typed="hello\n\n")
