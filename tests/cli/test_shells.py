"""Tab in the real shells, through a pseudo-terminal: what the command line becomes, read back with `echo`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

COMPLETIONS = Path(__file__).parents[2] / "completions"
WANTED = ("bash", "zsh", "fish")
# A developer may lack a shell; CI installs all three, and must not pass without one of them.
SHELLS = [name for name in WANTED if os.environ.get("CI") or shutil.which(name)]

START = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "PS1='READY''> '; bind 'set show-all-if-ambiguous on'; bind 'set bell-style none';"
        f"bind 'set enable-bracketed-paste off'; source {COMPLETIONS}/tqppo.bash",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        f"PROMPT='READY''> '; fpath=({COMPLETIONS} $fpath); autoload -Uz compinit; compinit -u -D;"
        "unset zle_bracketed_paste",
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        f"function fish_prompt; echo -n 'READY''> '; end; source {COMPLETIONS}/tqppo.fish",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a preset, a config file and a run with two checkpoints."""
    root = tmp_path_factory.mktemp("work")
    (root / "presets").mkdir()
    (root / "presets" / "my-special.toml").write_text('# Shows nothing.\nextends = "quickstart"\n')
    (root / "night-settings.toml").write_text("")
    for step in (2, 4):
        (root / "runs" / "first-run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (root / "home").mkdir()
    return root


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest, folder: Path) -> Iterator[pexpect.spawn]:
    command, setup = START[request.param]
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "TERM": "dumb" if request.param == "zsh" else "xterm",
        "LANG": "C.UTF-8",
    }
    child = pexpect.spawn(
        command[0], command[1:], cwd=str(folder), env=environ, encoding="utf-8", dimensions=(80, 200), timeout=60
    )
    child.sendline(setup)
    child.expect("READY> ")
    yield child
    child.close(force=True)


def completed(shell: pexpect.spawn, typed: str) -> str:
    """Type with Tabs, then turn the line into an `echo` and run that."""
    shell.send(typed)
    shell.send("\x01echo GOT''-LINE \x05 END''-OF-LINE\r")  # the quotes tell the output from what was typed
    shell.expect(r"GOT-LINE ([^\r\n]*?) +END-OF-LINE")
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shell.match.group(1))
    shell.expect("READY> ")
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("tqppo val\t", "tqppo validate-config"),
        ("tqppo presets di\t", "tqppo presets diff"),
        ("tqppo train --pre\t", "tqppo train --preset"),
        ("tqppo train --preset my-s\t", "tqppo train --preset my-special"),
        ("tqppo train --set rollout.bac\tv\t", "tqppo train --set rollout.backend=vllm"),
        ("tqppo train --set mode=g\t", "tqppo train --set mode=grpo"),
        ("tqppo train --set mode=grpo --set run.det\tf\t", "tqppo train --set mode=grpo --set run.deterministic=false"),
        ("tqppo validate-config --set chec\tinter\t", "tqppo validate-config --set checkpoint.interval="),
        ("tqppo train --config night\t", "tqppo train --config night-settings.toml"),
        ("tqppo resume fir\t", "tqppo resume first-run"),
        ("tqppo resume --checkpoint lat\t", "tqppo resume --checkpoint latest"),
        ("tqppo resume runs/\t4\t", "tqppo resume runs/first-run/checkpoints/step_000004"),
        ("tqppo config explain actor.l\t", "tqppo config explain actor.lr"),
        ("tqppo backends check storage si\t", "tqppo backends check storage simple"),
        ("tqppo backends install sg\t", "tqppo backends install sglang"),
    ],
)
def test_tab_completes_the_line(shell: pexpect.spawn, typed: str, line: str) -> None:
    assert completed(shell, typed) == line


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tqppo train --set algorithm.loss=\t\t", ["gspo", "cispo", "sapo"]),
        ("tqppo train --set run.deterministic=\t\t", ["true", "false"]),
    ],
)
def test_tab_lists_what_is_possible(shell: pexpect.spawn, typed: str, offered: list[str]) -> None:
    shell.send(typed)
    for _ in offered:
        shell.expect("|".join(offered))
    shell.send("\x03" if shell.command.endswith("fish") else "\x15\r")
    shell.expect("READY> ")
