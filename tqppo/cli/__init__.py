"""The command line. `app` is the console script; each command lives in its own file and imports late."""

from tqppo.cli.app import app

__all__ = ["app"]
