"""vLLM as a server in its own environment: tokens in, tokens out, over its `/inference/v1/generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tqppo.engines.capabilities import BUILT_IN
from tqppo.errors import BackendError, EngineError
from tqppo.protocols import Bucket, Completion, EngineCapabilities, FinishReason, Request, Scores, WeightSource

from .server.engine import CONTROL_TIMEOUT_S, ServerEngine
from .server.group import Meeting
from .server.http import Server

GUARD = Path(__file__).parent / "vllm_guard"
CPU_KV_BYTES, CPU_STEP_TOKENS = 256 * 1024**2, 4096
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLMRollout(ServerEngine):
    backend = "vllm"
    capabilities: ClassVar[EngineCapabilities] = BUILT_IN["vllm"]
    negatable = True

    def command(self, python: str, port: int) -> list[str]:
        # `vllm serve` needs package metadata that the CPU build does not have.
        server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        return [*server, "--host", self.spec.host, "--port", str(port)]

    def arguments(self) -> dict[str, Any]:
        spec = self.spec
        common = {
            "served-model-name": self.served_name,
            "max-model-len": self._context_limit(),
            "max-num-seqs": spec.max_running,
            "max-logprobs": -1,
            "logprobs-mode": "processed_logprobs",  # the default leaves out temperature and filters
            "generation-config": "vllm",  # sampling is said in each request, never taken from the model's folder
            "tokens-only": True,
            "trust-remote-code": spec.trust_remote_code or None,
            "seed": spec.seed,
            "disable-uvicorn-access-log": True,
            "worker-extension-cls": "tqppo_weights.Receiver",
            "middleware": "tqppo_guard.RequireToken" if self.token else None,
        }
        if not self.on_gpu:
            return common | self._cpu_arguments()
        return common | {
            "dtype": spec.dtype,
            "tensor-parallel-size": spec.tensor_parallel,
            "gpu-memory-utilization": spec.memory_fraction,
            "enable-sleep-mode": True,
        }

    def _cpu_arguments(self) -> dict[str, Any]:
        return {
            "dtype": "float32" if self.spec.dtype == "auto" else self.spec.dtype,
            "enforce-eager": True,
            "kv-cache-memory-bytes": CPU_KV_BYTES,
            # A prompt cut in two takes back a random number of its seed's generator, which those of a CPU refuse:
            # the engine would die. So prompts stay whole.
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(CPU_STEP_TOKENS, self._context_limit()),
        }

    def environment(self) -> dict[str, str]:
        common = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # the routes that load weights
        common |= {"PYTHONPATH": str(GUARD)}
        if self.token:
            common |= {"TQPPO_SERVER_TOKEN": self.token}
        if self.on_gpu:
            return common
        threads = str(self.spec.threads)
        return common | {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler delays the first answer by many seconds
            "HF_HUB_OFFLINE": "1",
        }

    def _context_limit(self) -> int:
        """One more than the longest sequence, because scoring samples a token; but no more than the model has."""
        config = Path(self.spec.model) / "config.json"
        limit = json.loads(config.read_text()).get("max_position_embeddings") if config.is_file() else None
        return min(self.spec.max_context_tokens + 1, limit or self.spec.max_context_tokens + 1)

    async def _inspect(self, server: Server) -> None:
        listed = await server.ask("GET", "/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        model = listed["data"][0]
        if server.process is not None:
            if model["id"] != self.served_name:
                raise EngineError(f"{server.url} is not the server that was started there: it serves {model['id']!r}")
            return
        self.served_name = model["id"]
        self._check_model(model["root"])
        version = (await server.ask("GET", "/version", timeout_s=CONTROL_TIMEOUT_S))["version"]
        info = await server.ask("GET", "/server_info?config_format=json", timeout_s=CONTROL_TIMEOUT_S)
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise BackendError(f"vLLM {version} at {server.url} needs --logprobs-mode processed_logprobs, not {mode}")

    async def _generate(self, server: Server, request: Request, request_id: str) -> Completion:
        sampling = request.sampling
        body = self._body(
            request.tokens,
            request_id,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=self._room(request),
            seed=request.seed % 2**63,
            logprobs=0,  # of the sampled token alone
            ignore_eos=True,  # what ends a sequence is said here, not in the model's folder
            stop_token_ids=sorted({*self.spec.eos_token_ids, *sampling.stop_token_ids}),
        )
        answer = await server.ask("POST", "/inference/v1/generate", body, timeout_s=self.spec.request_timeout_s)
        choice = answer["choices"][0]
        self._check_label({span["version"] for span in choice["weight_versions"] or ()})
        return Completion(
            tokens=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()],
            finish_reason=FINISH[choice["finish_reason"]],
            weight_version=self.version,
        )

    async def _score(self, server: Server, tokens: Sequence[int], top_k: int) -> Scores:
        body = self._body(tokens, f"score.{next(self._ids)}", temperature=1.0, max_tokens=1, prompt_logprobs=top_k)
        answer = await server.ask("POST", "/inference/v1/generate", body, timeout_s=self.spec.request_timeout_s)
        return _scores(tokens, answer["prompt_logprobs"], top_k)

    def _body(self, tokens: Sequence[int], request_id: str, **sampling: Any) -> dict[str, Any]:
        names = {"request_id": request_id, "model": self.served_name}
        return {**names, "token_ids": list(tokens), "sampling_params": {"detokenize": False, **sampling}}

    async def _abort(self, server: Server, request_id: str) -> None:
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await server.ask("POST", "/abort_requests", body, timeout_s=CONTROL_TIMEOUT_S)

    async def _push(self, server: Server, source: WeightSource) -> None:
        label = str(source.version)
        await self._post(server, "/pause?mode=wait")
        if source.sender is None:
            await self._call(server, "reload_weights", {"weights_path": source.folder})
        else:
            await self._receive(server, source, source.sender)
        await self._post(server, "/reset_prefix_cache")  # it holds what the old weights made of the prompts
        await self._post(server, "/update_weight_version", {"new_version": label})
        await self._post(server, "/resume")
        found = (await server.ask("GET", "/weight_info", timeout_s=CONTROL_TIMEOUT_S))["weight_version"]
        if found != label:
            raise EngineError(f"{self.spec.name} says it has weights {found!r} after loading {label!r}")
        self.label = label

    async def _join(self, server: Server, meeting: Meeting) -> None:
        await self._call(server, "tqppo_join", asdict(meeting))

    async def _take(self, server: Server, group: str, buckets: Sequence[Bucket]) -> None:
        told = {"buckets": [asdict(each) for each in buckets]}
        await self._call(server, "tqppo_receive", told, timeout_s=CONTROL_TIMEOUT_S * len(buckets))

    async def _call(
        self, server: Server, method: str, arguments: Mapping[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """A method of vLLM's workers, on each of them."""
        await server.ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments}, timeout_s=timeout_s)

    async def _post(self, server: Server, path: str, body: Mapping[str, Any] | None = None) -> None:
        await server.ask("POST", path, body, timeout_s=CONTROL_TIMEOUT_S)

    async def sleep(self) -> None:
        if self.on_gpu:
            await (await self._server()).ask("POST", "/sleep?level=1", timeout_s=CONTROL_TIMEOUT_S)

    async def wake(self) -> None:
        if self.on_gpu:
            await (await self._server()).ask("POST", "/wake_up", timeout_s=CONTROL_TIMEOUT_S)


def _scores(tokens: Sequence[int], prompt_logprobs: list[dict[str, Any] | None], top_k: int) -> Scores:
    """Entry i + 1 of the answer is about token i + 1; it may hold the token itself beside the K likeliest."""
    logprobs = np.zeros(len(tokens), np.float32)
    ids = np.zeros((len(tokens), top_k), np.int32)
    tops = np.zeros((len(tokens), top_k), np.float32)
    for row, entry in enumerate(prompt_logprobs[1:]):
        assert entry is not None, "only the first token has no log-probability"
        logprobs[row] = entry[str(tokens[row + 1])]["logprob"]
        for token, found in entry.items():
            if found["rank"] <= top_k:
                ids[row, found["rank"] - 1], tops[row, found["rank"] - 1] = int(token), found["logprob"]
    return Scores(logprobs, ids, tops)
