"""Runs inside the vLLM server: what its flag `--middleware` names, put together from the other files of this folder."""

import os
from typing import Any

from tqppo_guard import RequireToken
from tqppo_scores import ScoreRoute


class Extension:
    """ASGI middleware: the route of scores, and beyond loopback the token in front of all routes."""

    def __init__(self, app: Any) -> None:
        scored = ScoreRoute(app)
        self.app = RequireToken(scored) if "TQPPO_SERVER_TOKEN" in os.environ else scored

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
