"""`schema`: the config's JSON Schema."""

from __future__ import annotations

from tqppo.cli.output import emit_json


def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    from tqppo.config.show.explain import json_schema

    emit_json(json_schema())
