"""Ray's own authentication for a private Ray: every call to its processes needs a token that only this user can read.

Without it, any process on the machine that finds the port can run code as this user.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
FILE = "token"
TOKEN_BYTES = 32


@contextmanager
def new_token(folder: Path) -> Iterator[None]:
    """Have a Ray that is started within this context ask for a new token, which lies in `folder`.

    `RAY_AUTH_MODE=disabled` in the environment switches this off. The environment is what it was afterwards.
    """
    before = {name: os.environ.get(name) for name in (MODE, TOKEN, TOKEN_PATH)}
    if (before[MODE] or "").lower() == "disabled":
        yield
        return
    os.environ[MODE], os.environ[TOKEN_PATH] = "token", str(_written(folder / FILE))
    os.environ.pop(TOKEN, None)  # Ray would prefer it
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _read_again()


def _written(path: Path) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    return path


def _read_again() -> None:
    """Have Ray in this process read mode and token again: it keeps those of the moment when it was imported."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # it is compiled

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
