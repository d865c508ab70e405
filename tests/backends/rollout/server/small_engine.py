"""An engine over `small_server.py`: a `ServerApi` with the methods that every server engine needs, and no more."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineCapabilities, Request, Scores

api: Any = importlib.import_module("tqppo_backends.rollout.server.api")
engine: Any = importlib.import_module("tqppo_backends.rollout.server.engine")


class SmallApi(api.ServerApi):
    backend = "small"
    dying_s = 1.0

    def command(self, python: str, port: int) -> list[str]:
        script = Path(__file__).with_name("small_server.py")
        return [python, str(script), "--host", self.spec.host, "--port", str(port)]

    def arguments(self) -> dict[str, Any]:
        return {"served": self.served_name}

    def environment(self) -> dict[str, str]:
        return {"LIVES": os.environ.get("LIVES", "/nowhere")}

    async def inspect(self, server: Any) -> None:
        self.inspected = server
        if (await server.ask("GET", "/model", timeout_s=10))["model"] != self.served_name:
            raise EngineError("it serves another model")

    async def generate(self, server: Any, request: Request, request_id: str) -> Completion:
        body: dict[str, Any] = {"id": request_id, "seed": request.seed, "slow": request.sampling.temperature}
        if request.tokens[0] == 13:
            body["poison"] = True
        answer = await server.ask("POST", "/generate", body, timeout_s=self.spec.request_timeout_s)
        return Completion([answer["seed"], answer["pid"]], [0.0, 0.0], "abort" if answer["aborted"] else "stop", 0)

    async def score(self, server: Any, tokens: Sequence[int], top_k: int, start: int, *, hidden: bool) -> Scores:
        empty = np.zeros((len(tokens), top_k), np.float32)
        return Scores(np.zeros(len(tokens), np.float32), empty.astype(np.int32), empty)

    async def abort(self, server: Any, request_id: str) -> None:
        await server.ask("POST", "/abort", {"id": request_id}, timeout_s=10)

    async def load_folder(self, server: Any, folder: str) -> None:
        await server.ask("POST", "/load", {"folder": folder}, timeout_s=10)

    async def finish_update(self, server: Any, label: str) -> None:
        await server.ask("POST", "/label", {"version": label}, timeout_s=10)

    async def loaded_label(self, server: Any) -> str:
        return (await server.ask("GET", "/weights", timeout_s=10))["weights"]


class SmallEngine(engine.ServerEngine):
    api_type = SmallApi
    capabilities = EngineCapabilities()

    async def weights(self) -> str:
        return await self.api.loaded_label(await self.servers.live())


PYTHON = sys.executable
