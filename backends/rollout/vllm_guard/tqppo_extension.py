"""Runs inside the vLLM server: what its flag `--middleware` names, put together from the other files of this folder."""

from typing import Any

from tqppo_guard import RequireToken
from tqppo_scores import ScoreRoute


class Extension:
    """ASGI middleware: the token in front of all routes, and the route of scores."""

    def __init__(self, app: Any) -> None:
        self.app = RequireToken(ScoreRoute(app))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
