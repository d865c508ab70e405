"""Completes a half-typed command line, for bash, zsh and fish.

The shell's script passes the line up to the cursor in `_TQPPO_LINE`. The answer has one candidate per line, followed by
a tab and its description, or is `:files`. Nothing heavy is imported here, so that Tab responds at once.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import typer

from tqppo.cli import candidates, scripts
from tqppo.cli.candidates import Candidate
from tqppo.errors import UsageError

VARIABLE = "_TQPPO_COMPLETE"
LINE = "_TQPPO_LINE"
FILES = ":files"


class Parameter(Protocol):
    """An option or argument of Typer's; arguments lack what only options have."""

    name: str
    param_type_name: str  # "option" or "argument"
    opts: Sequence[str]
    nargs: int
    hidden: bool
    help: str | None
    is_flag: bool
    count: bool


class Command(Protocol):
    """A command of Typer's."""

    params: Sequence[Parameter]
    hidden: bool
    help: str | None


def respond(root: object) -> None:
    """Answer the shell. `root` is the command tree."""
    for value, note in answer(cast(Command, root), words_of(os.environ.get(LINE, ""))):
        typer.echo(f"{value}\t{note}".rstrip())


def words_of(line: str) -> list[str]:
    """The words after the program's name; the last one is the word at the cursor, which may be empty."""
    for closing in ("", '"', "'"):  # the word at the cursor may have an open quote
        lexer = shlex.shlex(line + closing, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = list(lexer)
        except ValueError:
            continue
        return words[1:] + [""] * (not closing and line[-1:].isspace())
    return []


def subcommands(command: Command) -> Mapping[str, Command]:
    """The commands of a group; empty for a command that is not a group."""
    return cast(Mapping[str, Command], getattr(command, "commands", {}))


def answer(command: Command, words: list[str]) -> list[Candidate]:
    """Walk the finished words down the command tree, then offer the candidates for the last one."""
    *finished, word = words or [""]
    open_option: Parameter | None = None  # an option whose value comes next
    num_arguments = 0
    for each in finished:
        if open_option is not None:
            open_option = None
        elif each.startswith("-"):
            open_option = None if "=" in each else _option(command, each)
        elif known := subcommands(command):
            if each not in known:
                return []
            command = known[each]
        else:
            num_arguments += 1
    if open_option is not None:
        return _values(open_option, word)
    if word.startswith("-"):
        return _options(command, word)
    if known := subcommands(command):
        return _matching(word, ((name, _short(sub.help)) for name, sub in known.items() if not sub.hidden))
    return _argument(command, num_arguments, word, finished)


def _option(command: Command, word: str) -> Parameter | None:
    """The option of this name, if it takes a value."""
    for param in command.params:
        if param.param_type_name == "option" and word in param.opts:
            return None if param.is_flag or param.count else param
    return None


def _options(command: Command, word: str) -> list[Candidate]:
    name, equals, value = word.partition("=")
    if equals and (option := _option(command, name)) is not None:
        found = _values(option, value)
        return found if found == [(FILES, "")] else [(f"{name}={each}", note) for each, note in found]
    offered = [("--help", "Show what this command does.")]
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            offered += [(opt, _short(param.help)) for opt in param.opts if opt.startswith("--")]
    return _matching(word, offered)


def _argument(command: Command, number: int, word: str, finished: list[str]) -> list[Candidate]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if not arguments or (number >= len(arguments) and arguments[-1].nargs != -1):
        return []
    return _values(arguments[min(number, len(arguments) - 1)], word, finished)


def _values(param: Parameter, word: str, finished: list[str] | None = None) -> list[Candidate]:
    """The values of an option or argument; parameters of one name mean the same in every command."""
    if param.name in candidates.PATHS:
        return [(FILES, "")]
    offer = candidates.BY_PARAMETER.get(param.name)
    return _matching(word, offer(word, finished or [])) if offer else []


def _matching(word: str, offered: Iterable[Candidate]) -> list[Candidate]:
    return [(value, note) for value, note in offered if value.startswith(word)]


def _short(text: str | None) -> str:
    return (text or "").split("\n")[0]


def script(shell: str) -> str:
    """The script that makes a shell call this program on Tab."""
    return scripts.BY_SHELL[_known(shell)].strip()


def install(shell: str) -> tuple[Path, str]:
    """Write the script where the shell looks for it; returns the file and what the user still has to do."""
    shell = _known(shell)
    place, left_to_do = scripts.PLACES[shell]
    path = Path(os.path.expandvars(place)).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script(shell) + "\n")
    return path, left_to_do.format(path=path, folder=path.parent)


def _known(shell: str) -> str:
    if shell == "auto":
        shell = Path(os.environ.get("SHELL", "")).name
    if shell not in scripts.BY_SHELL:
        raise UsageError(f"no completion for the shell {shell!r}; name one of {', '.join(scripts.BY_SHELL)}")
    return shell
