"""vLLM as a server in its own environment: tokens in, tokens out, through its route `/inference/v1/generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from tqppo import weights
from tqppo.engines.capabilities import BUILT_IN
from tqppo.errors import BackendError, EngineError
from tqppo.protocols import Bucket, Completion, EngineCapabilities, FinishReason, Request, Scores
from tqppo.weights.identity import WeightReport

from .server.api import CONTROL_TIMEOUT_S, Arguments, EnginePart, ServerApi, check_served_model, tokens_left
from .server.cache import cache_tokens, token_bytes
from .server.engine import ServerEngine
from .server.group import Rendezvous
from .server.http import EngineServer
from .server.scores import no_scores, unpacked

GUARD = Path(__file__).parent / "vllm_guard"
CHECKSUM = Path(weights.__file__).parent / "checksum.py"  # loaded by `vllm_guard/tqppo_weights.py`
SCORE_ROUTE = "/tqppo/score"  # of `vllm_guard/tqppo_scores.py`
CPU_STEP_TOKENS = 4096
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLMServer(ServerApi):
    backend = "vllm"
    has_no_flags = True

    def command(self, python: str, port: int) -> list[str]:
        # `vllm serve` needs package metadata that the CPU build does not have.
        server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        return [*server, "--host", self.spec.host, "--port", str(port)]

    def arguments(self) -> Arguments:
        spec = self.spec
        common: Arguments = {
            "served-model-name": self.served_name,
            "max-model-len": self._context_limit(),
            "max-num-seqs": spec.max_running,
            "max-logprobs": -1,
            "logprobs-mode": "processed_logprobs",  # the default leaves out temperature and filters
            "generation-config": "vllm",  # requests say how to sample, never the model's folder
            "tokens-only": True,
            "enable-prompt-tokens-details": True,  # answers say how many tokens came from the prefix cache
            "trust-remote-code": spec.trust_remote_code or None,
            "seed": spec.seed,
            "disable-uvicorn-access-log": True,
            "worker-extension-cls": "tqppo_weights.Receiver",
            "middleware": "tqppo_extension.Extension",
        }
        if not self.on_gpu:
            return common | self._cpu_arguments()
        return common | {
            "dtype": spec.dtype,
            "tensor-parallel-size": spec.tensor_parallel,
            "gpu-memory-utilization": spec.memory_fraction,
            "enable-sleep-mode": True,
        }

    def _cpu_arguments(self) -> Arguments:
        return {
            "dtype": "float32" if self.spec.dtype == "auto" else self.spec.dtype,
            "enforce-eager": True,
            "kv-cache-memory-bytes": cache_tokens(self.spec, self._context_limit()) * token_bytes(self.spec),
            # After a partial prefill vLLM rewinds the request's random generator, which CPU generators do not support:
            # the engine would die.
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(CPU_STEP_TOKENS, self._context_limit()),
        }

    def environment(self) -> dict[str, str]:
        common = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # dev mode has the routes that load weights
        common |= {"PYTHONPATH": str(GUARD), "TQPPO_CHECKSUM": str(CHECKSUM), "TQPPO_SERVER_TOKEN": self.token}
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
        """One more than the longest sequence, because scoring samples a token, but at most the model's own limit."""
        config = Path(self.spec.model) / "config.json"
        limit = json.loads(config.read_text()).get("max_position_embeddings") if config.is_file() else None
        return min(self.spec.max_context_tokens + 1, limit or self.spec.max_context_tokens + 1)

    async def inspect(self, server: EngineServer) -> None:
        self.compact_scores = await server.has_route(SCORE_ROUTE)  # a server to attach to may not have it
        listed = await server.ask("GET", "/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        model = listed["data"][0]
        if server.process is not None:
            if model["id"] != self.served_name:
                raise EngineError(f"{server.url} is not the server that was started there: it serves {model['id']!r}")
            return
        self.served_name = model["id"]
        check_served_model(self.spec, model["root"])
        version = (await server.ask("GET", "/version", timeout_s=CONTROL_TIMEOUT_S))["version"]
        info = await server.ask("GET", "/server_info?config_format=json", timeout_s=CONTROL_TIMEOUT_S)
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise BackendError(f"vLLM {version} at {server.url} needs --logprobs-mode processed_logprobs, not {mode}")

    async def generate(self, server: EngineServer, request: Request, request_id: str) -> Completion:
        sampling = request.sampling
        body = self._body(
            request.tokens,
            request_id,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=tokens_left(self.spec, request),
            # A seed makes vLLM sample each sequence on its own, in a loop.
            seed=request.seed % 2**63 if self.spec.deterministic else None,
            logprobs=0,  # only the sampled token's own
            ignore_eos=True,  # `stop_token_ids` says what ends a sequence, not the model's folder
            stop_token_ids=sorted({*self.spec.eos_token_ids, *sampling.stop_token_ids}),
        )
        answer = await server.ask("POST", "/inference/v1/generate", body, timeout_s=self.spec.request_timeout_s)
        choice = answer["choices"][0]
        self.check_label({span["version"] for span in choice["weight_versions"] or ()})
        return Completion(
            tokens=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()],
            finish_reason=FINISH[choice["finish_reason"]],
            weight_version=0,
            reused_tokens=_num_cached(answer.get("usage")),
        )

    async def score(
        self, server: EngineServer, tokens: Sequence[int], top_k: int, start: int, *, hidden: bool
    ) -> Scores:
        request_id = f"score.{next(self.numbers)}"
        if self.compact_scores:
            asked = {"token_ids": list(tokens), "top_k": top_k, "start": start, "request_id": request_id}
            content = await server.ask_bytes("POST", SCORE_ROUTE, asked, timeout_s=self.spec.request_timeout_s)
            return unpacked(content, len(tokens), top_k, start)
        body = self._body(tokens, request_id, temperature=1.0, max_tokens=1, prompt_logprobs=top_k)
        answer = await server.ask("POST", "/inference/v1/generate", body, timeout_s=self.spec.request_timeout_s)
        return _scores(tokens, answer["prompt_logprobs"], top_k, start)

    def _body(self, tokens: Sequence[int], request_id: str, **sampling: object) -> dict[str, object]:
        names = {"request_id": request_id, "model": self.served_name}
        return {**names, "token_ids": list(tokens), "sampling_params": {"detokenize": False, **sampling}}

    async def abort(self, server: EngineServer, request_id: str) -> None:
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await server.ask("POST", "/abort_requests", body, timeout_s=CONTROL_TIMEOUT_S)

    async def begin_update(self, server: EngineServer) -> None:
        await _post(server, "/pause?mode=wait")

    async def load_folder(self, server: EngineServer, folder: str) -> None:
        if server.process is None:  # a server to attach to may not have our extension
            await _call_workers(server, "reload_weights", {"weights_path": folder})
        else:
            await _call_workers(server, "tqppo_load", {"folder": folder})

    async def join_group(self, server: EngineServer, rendezvous: Rendezvous) -> None:
        await _call_workers(server, "tqppo_join", asdict(rendezvous))

    async def receive_buckets(self, server: EngineServer, group: str, buckets: Sequence[Bucket]) -> None:
        arguments = {"buckets": [asdict(bucket) for bucket in buckets]}
        await _call_workers(server, "tqppo_receive", arguments, timeout_s=CONTROL_TIMEOUT_S * len(buckets))

    async def finish_update(self, server: EngineServer, label: str) -> None:
        await _post(server, "/reset_prefix_cache")  # it holds keys and values of the old weights
        await _post(server, "/update_weight_version", {"new_version": label})
        await _post(server, "/resume")

    async def loaded_label(self, server: EngineServer) -> str:
        return str((await server.ask("GET", "/weight_info", timeout_s=CONTROL_TIMEOUT_S))["weight_version"])

    async def weight_reports(self, server: EngineServer) -> list[WeightReport] | None:
        if server.process is None:
            return None
        found = await _call_workers(server, "tqppo_checksums", {})
        return [WeightReport(each["held"], each["given"], each["parts"]) for each in found]

    async def sleep(self, server: EngineServer) -> None:
        await _post(server, "/sleep?level=1")

    async def wake(self, server: EngineServer, part: EnginePart) -> None:
        await _post(server, f"/wake_up?tags={'kv_cache' if part == 'cache' else part}")


class VLLMRollout(ServerEngine):
    api_type = VLLMServer
    capabilities: ClassVar[EngineCapabilities] = BUILT_IN["vllm"]


def _scores(tokens: Sequence[int], entries: Sequence[Mapping[str, Any] | None], top_k: int, start: int) -> Scores:
    """Row i of the scores is entry i + 1 of vLLM's answer, which has token i + 1 besides the K likeliest tokens."""
    scores = no_scores(len(tokens), top_k)
    for row in range(start, len(tokens) - 1):
        entry = entries[row + 1]
        assert entry is not None, "only the first token has no log-probability"
        scores.logprobs[row] = entry[str(tokens[row + 1])]["logprob"]
        for token, found in entry.items():
            if found["rank"] <= top_k:
                scores.top_ids[row, found["rank"] - 1] = int(token)
                scores.top_logprobs[row, found["rank"] - 1] = found["logprob"]
    return scores


def _num_cached(usage: Mapping[str, Any] | None) -> int:
    """Tokens of the prompt that came from the prefix cache; 0 where the server does not say."""
    details = (usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def _call_workers(
    server: EngineServer, method: str, arguments: Mapping[str, object], timeout_s: float = CONTROL_TIMEOUT_S
) -> list[Any]:
    """Call a method of each of vLLM's worker processes; returns their answers."""
    body = {"method": method, "kwargs": arguments}
    answer = await server.ask("POST", "/collective_rpc", body, timeout_s=timeout_s)
    return list(answer["results"]) if answer else []


async def _post(server: EngineServer, path: str, body: Mapping[str, object] | None = None) -> None:
    await server.ask("POST", path, body, timeout_s=CONTROL_TIMEOUT_S)
