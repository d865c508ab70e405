"""Runs inside the vLLM server: every route but `/health` needs the token, on loopback too, where other users are.

vLLM's own `--api-key` protects the inference routes only, not those that pause the server or load weights.
"""

import hmac
import os
from typing import Any


class RequireToken:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ['TQPPO_SERVER_TOKEN']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] == "lifespan" or scope["path"] == "/health" or self.has_token(scope["headers"])
        if not is_open and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if not is_open:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"a bearer token is required"})
            return
        await self.app(scope, receive, send)

    def has_token(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(hmac.compare_digest(value, self.expected) for name, value in headers if name == b"authorization")
