"""The tools of a loop, and the processes that run them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from tqppo import plugins
from tqppo.processes.pool import ProcessPool, ProcessSpec, SampleFailed
from tqppo.rollout.tools.calls import ToolCall
from tqppo.rollout.tools.schema import Tool, WrongArguments
from tqppo.units import GIB

GRACE_S = 10.0  # the process ends a late call itself and then what the call started; after this much longer it is stuck


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Which functions to run, and within which limits."""

    tools: Sequence[str]
    workers: int = 4
    timeout_s: float = 10.0
    max_chars: int = 256
    memory_gb: float = 8.0

    def process(self) -> ProcessSpec:
        return ProcessSpec(
            module="tqppo.rollout.tools.process",
            what=f"tools {', '.join(self.tools)}",
            start={
                "tools": [plugins.absolute(path) for path in self.tools],
                "max_chars": self.max_chars,
                "memory_bytes": int(self.memory_gb * GIB),
            },
            timeout_s=self.timeout_s,
            grace_s=GRACE_S,
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave: text for the model, whether it is an error, and how long it took."""

    text: str
    is_error: bool = False
    seconds: float = 0.0


class ToolPool:
    """Makes calls, each within its deadline. The constructor starts the processes, `close` leaves none behind."""

    def __init__(self, spec: ToolSpec) -> None:
        self._pool = ProcessPool(spec.process(), spec.workers)
        self._threads = ThreadPoolExecutor(spec.workers, thread_name_prefix="tools")
        schemas = cast("list[Mapping[str, object]]", self._pool.ready["schemas"])
        self.tools = {tool.name: tool for tool in map(Tool.of, schemas)}

    async def call(self, call: ToolCall) -> ToolResult:
        """Make a call; whatever is wrong with it or goes wrong in it is a result that says so."""
        if call.error:
            return ToolResult(call.error, is_error=True)
        if call.name not in self.tools:
            known = ", ".join(self.tools)
            return ToolResult(f"there is no tool called {call.name!r:.60}; tools: {known}", is_error=True)
        try:
            arguments = self.tools[call.name].arguments(call.arguments)
        except WrongArguments as wrong:
            return ToolResult(str(wrong), is_error=True)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, call.name, arguments)

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)

    def _call(self, name: str, arguments: Mapping[str, object]) -> ToolResult:
        begin = perf_counter()
        try:
            text = str(self._pool.call({"tool": name, "arguments": arguments}))
            return ToolResult(text, seconds=perf_counter() - begin)
        except SampleFailed as failure:
            return ToolResult(str(failure), is_error=True, seconds=perf_counter() - begin)
