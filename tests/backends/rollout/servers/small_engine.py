"""The engine of `small_server`: what a subclass of `ServerEngine` has to say, and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tqppo import plugins
from tqppo.protocols import Completion, EngineCapabilities, Request, Scores, WeightSource

ServerEngine: Any = plugins.load("rollout", "vllm").__mro__[1]


class SmallEngine(ServerEngine):
    backend = "vllm"  # any that has an environment; the interpreter is given
    capabilities = EngineCapabilities()

    def command(self, python: str, port: int) -> list[str]:
        script = Path(__file__).with_name("small_server.py")
        return [python, str(script), "--host", self.spec.host, "--port", str(port)]

    def arguments(self) -> dict[str, Any]:
        return {"served": self.served_name}

    def environment(self) -> dict[str, str]:
        return {"LIVES": os.environ.get("LIVES", "/nowhere")}

    def _connect(self, *arguments: Any) -> Any:
        server = super()._connect(*arguments)
        server.dying_s = 1.0
        return server

    async def _generate(self, server: Any, request: Request, request_id: str) -> Completion:
        body: dict[str, Any] = {"seed": request.seed, "slow": request.sampling.temperature}
        if request.tokens[0] == 13:
            body["poison"] = True
        answer = await server.ask("POST", "/generate", body, timeout_s=self.spec.request_timeout_s)
        return Completion([answer["seed"], answer["pid"]], [0.0, 0.0], "stop", self.version)

    async def _score(self, server: Any, tokens: Sequence[int], top_k: int) -> Scores:
        empty = np.zeros((len(tokens), top_k), np.float32)
        return Scores(np.zeros(len(tokens), np.float32), empty.astype(np.int32), empty)

    async def _push(self, server: Any, source: WeightSource) -> None:
        await server.ask("POST", "/load", {"version": str(source.version)}, timeout_s=10)

    async def weights(self) -> str:
        server = await self._server()
        return (await server.ask("GET", "/weights", timeout_s=10))["weights"]


PYTHON = sys.executable
