"""Usage errors in the words of this program, with what to type instead: of `--lr 1e-3`, `train quickstart`, …"""

from __future__ import annotations

import re
from collections.abc import Sequence

from typer.exceptions import TyperException

from tqppo.errors import UsageError


def explained(error: TyperException, arguments: Sequence[str]) -> UsageError:
    """The error of the option parser as one of ours."""
    said = str(getattr(error, "format_message", lambda: str(error))()).strip()
    message = f"{said[:1].lower()}{said[1:]}".rstrip(".")
    option = re.search(r"[Nn]o such option:? '?(--?[\w.-]+)", said)
    command = re.search(r"[Nn]o such command '([^']+)'", said)
    fix = setting_for(option[1], arguments) if option else data_command(command[1], arguments) if command else ""
    message = message.partition(" (Possible options")[0] if option and fix else message
    usage = _usage(error)
    parts = [message, *([f"  fix: {fix}"] if fix else []), *([f"  {usage}"] if usage else [])]
    return UsageError("\n".join(parts))


def setting_for(option: str, arguments: Sequence[str]) -> str:
    """`--lr` is no option, but there are settings of that name: how to write them."""
    from tqppo.config.schema import settings

    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in settings() if key == name or key.rpartition(".")[2] == name]
    keys.sort(key=lambda key: not key.startswith("actor."))  # what is meant most often
    if not keys:
        return ""
    value = next((_value(each, rest) for each, rest in _with_next(arguments) if each.split("=")[0] == option), "VALUE")
    ways = [f"--set {key}={value}" for key in keys[:3]]
    return f"settings are written {' or '.join(ways)}"


def data_command(word: str, arguments: Sequence[str]) -> str:
    """`data gsm8k` and `data rows.jsonl` lack their verb: the command in full."""
    from tqppo.builtin import DATA_FILES
    from tqppo.data.recipes import RECIPES

    if "data" not in arguments[:-1]:
        return ""
    verb = "get" if word in RECIPES else "show" if word.endswith(DATA_FILES) or ":" in word else ""
    return f"write tqppo data {verb} {word}" if verb else ""


def as_settings(words: Sequence[str], presets: Sequence[str]) -> list[str]:
    """Bare `key=value` arguments, as Hydra's users write them. UsageError for any other word, with what it may mean."""
    for word in words:
        if "=" in word:
            continue
        if word in presets:
            raise UsageError(f"{word} is a preset: write --preset {word}")
        if word.endswith(".toml"):
            raise UsageError(f"{word} is a file: write --config {word}")
        raise UsageError(f"unexpected argument {word!r}; a preset needs --preset NAME, a setting is key=value")
    return list(words)


def _with_next(arguments: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(arguments, [*arguments[1:], ""], strict=True))


def _value(word: str, following: str) -> str:
    _, equals, value = word.partition("=")
    return value if equals else following if following and not following.startswith("--") else "VALUE"


def _usage(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"help: {context.command_path} --help" if context is not None else ""
