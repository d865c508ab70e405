"""SGLang as a server in its own environment: tokens in, tokens out, through its route `/generate`."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tqppo.engines.capabilities import BUILT_IN
from tqppo.errors import EngineError
from tqppo.protocols import (
    Bucket,
    Completion,
    EngineCapabilities,
    EngineSpec,
    FinishReason,
    Request,
    Sampling,
    Scores,
)

from .server.api import CONTROL_TIMEOUT_S, Arguments, EnginePart, ServerApi, check_served_model, tokens_left
from .server.cache import cache_tokens
from .server.engine import ServerEngine
from .server.group import Rendezvous
from .server.http import EngineServer
from .server.scores import no_scores

CPU_SUPPORT = Path(__file__).parent / "sglang_cpu"
GUARD = Path(__file__).parent / "sglang_guard"
RESERVED_TOKENS = 8  # SGLang refuses inputs that are less than seven tokens shorter than its context
MASK_TOKENS = 32_768  # largest number of tokens that may be left after top-k and top-p
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangServer(ServerApi):
    backend = "sglang"
    grace_s = 0.0  # after SIGTERM it sleeps for seconds and then kills its own processes

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._joined = ("", "")  # a server, and the group in which it gets weights

    def command(self, python: str, port: int) -> list[str]:
        server = [python, "-m", "tqppo_launch", "--model-path", self.model]
        return [*server, "--host", self.spec.host, "--port", str(port)]

    def arguments(self) -> Arguments:
        spec = self.spec
        common: Arguments = {
            "served-model-name": self.served_name,
            "context-length": spec.max_context_tokens + RESERVED_TOKENS,
            "max-running-requests": spec.max_running,
            "skip-tokenizer-init": True,
            "skip-server-warmup": True,
            "trust-remote-code": spec.trust_remote_code,
            "random-seed": spec.seed,
            "enable-deterministic-inference": spec.deterministic,  # SGLang ignores seeds without it
            "sampling-mask-max-tokens": MASK_TOKENS,
            "log-level": "warning",
        }
        if spec.scores_hidden:
            # Of a prompt in several chunks SGLang returns the states of the first one only.
            common |= {"enable-return-hidden-states": True, "chunked-prefill-size": -1}
        return common | (self._gpu_arguments() if self.on_gpu else self._cpu_arguments())

    def _gpu_arguments(self) -> Arguments:
        return {
            "dtype": self.spec.dtype,
            "tensor-parallel-size": self.spec.tensor_parallel,
            "mem-fraction-static": self.spec.memory_fraction,
            "enable-memory-saver": True,
            "enable-weights-cpu-backup": True,  # or the weights would be lost in a sleep
        }

    def _cpu_arguments(self) -> Arguments:
        return {
            "dtype": "float32" if self.spec.dtype == "auto" else self.spec.dtype,
            "device": "cpu",
            "attention-backend": "torch_native",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            "disable-overlap-schedule": True,
            # SGLang would size the cache by the machine's memory.
            "mem-fraction-static": self.spec.memory_fraction,  # its own choice is negative with prompts of one chunk
            "max-total-tokens": cache_tokens(self.spec, self.spec.max_context_tokens + RESERVED_TOKENS),
            "sleep-on-idle": True,  # an idle server would keep a core busy
        }

    def environment(self) -> dict[str, str]:
        common = {"TOKENIZERS_PARALLELISM": "false", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        common |= {"PYTHONPATH": str(GUARD), "TQPPO_SERVER_TOKEN": self.token}
        if self.on_gpu:
            return common
        return common | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": f"{CPU_SUPPORT}{os.pathsep}{GUARD}",
            "OMP_NUM_THREADS": str(self.spec.threads),
            "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler costs more than it saves
            "HF_HUB_OFFLINE": "1",
        }

    async def inspect(self, server: EngineServer) -> None:
        info = await server.ask("GET", "/model_info", timeout_s=CONTROL_TIMEOUT_S)
        if server.process is None:
            check_served_model(self.spec, info["model_path"])
            settings = await server.ask("GET", "/server_info", timeout_s=CONTROL_TIMEOUT_S)
            if not settings["skip_tokenizer_init"]:
                raise EngineError(f"SGLang {settings['version']} at {server.url} needs --skip-tokenizer-init")
            if self.spec.scores_hidden and not settings.get("enable_return_hidden_states"):
                raise EngineError(
                    f"SGLang {settings['version']} at {server.url} gives no hidden states: start it with "
                    "--enable-return-hidden-states --chunked-prefill-size -1, or choose a top-k loss"
                )
        elif info["served_model_name"] != self.served_name:
            found = info["served_model_name"]
            raise EngineError(f"{server.url} is not the server that was started there: it serves {found!r}")

    async def generate(self, server: EngineServer, request: Request, request_id: str) -> Completion:
        """SGLang always stops at the model's own end token; if the request does not stop there, it is continued."""
        sampling, stops = request.sampling, {*self.spec.eos_token_ids, *request.sampling.stop_token_ids}
        limit = tokens_left(self.spec, request)
        tokens: list[int] = []
        logprobs: list[float] = []
        reused = 0
        while True:
            seeded = {"sampling_seed": request.seed % 2**63, "stop_token_ids": sorted(stops)}
            body = self._body([*request.tokens, *tokens], request_id, sampling, limit - len(tokens), seeded)
            answer = await server.ask("POST", "/generate", body, timeout_s=self.spec.request_timeout_s)
            meta = answer["meta_info"]
            self.check_label({meta["weight_version"]})
            reused = reused if tokens else min(int(meta.get("cached_tokens", 0)), len(request.tokens))
            tokens += answer["output_ids"]
            logprobs += _logprobs(meta)
            finish = FINISH[meta["finish_reason"]["type"]]
            if finish == "stop" and tokens[-1] not in stops:
                if len(tokens) < limit:
                    continue
                finish = "length"
            return Completion(tokens, logprobs, finish, weight_version=0, reused_tokens=reused)

    def _body(
        self, tokens: Sequence[int], request_id: str, sampling: Sampling, limit: int, more: Mapping[str, object]
    ) -> dict[str, object]:
        is_filtered = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        no_top_k = MASK_TOKENS - 1024 if is_filtered else -1  # a mask needs a limit, with headroom for ties
        return {
            "rid": request_id,
            "input_ids": list(tokens),
            "return_logprob": True,
            "return_sampling_mask": is_filtered,  # the plain log-probabilities leave out top-p and top-k
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or no_top_k,
                "max_new_tokens": limit,
                "skip_special_tokens": False,
                **more,
            },
        }

    async def score(
        self, server: EngineServer, tokens: Sequence[int], top_k: int, start: int, *, hidden: bool
    ) -> Scores:
        body = {
            "rid": f"score.{next(self.numbers)}",
            "input_ids": list(tokens),
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top_k,
            # Arrays in base64 instead of lists; versions that do not know the flags ignore them.
            "return_flat_raw_top_logprobs": self.compact_scores,
            "return_flat_raw_top_logprobs_b64": self.compact_scores,
            "return_hidden_states": hidden,
            # Without a new token SGLang returns no hidden states.
            "sampling_params": {"temperature": 1.0, "max_new_tokens": int(hidden)},
        }
        answer = await server.ask("POST", "/generate", body, timeout_s=self.spec.request_timeout_s)
        meta = answer["meta_info"]
        self.check_label({meta["weight_version"]})
        scores = _scores(len(tokens), meta, top_k, start)
        return replace(scores, hidden=_hidden(len(tokens), meta, start)) if hidden else scores

    async def abort(self, server: EngineServer, request_id: str) -> None:
        await server.ask("POST", "/abort_request", {"rid": request_id}, timeout_s=CONTROL_TIMEOUT_S)

    async def begin_update(self, server: EngineServer) -> None:
        await self._post(server, "/pause_generation", mode="retract")
        await self._post(server, "/begin_weight_update")

    async def load_folder(self, server: EngineServer, folder: str) -> None:
        await self._post(server, "/update_weights_from_disk", model_path=folder, flush_cache=False)

    async def join_group(self, server: EngineServer, rendezvous: Rendezvous) -> None:
        joined_by, group = self._joined
        if joined_by == server.identity:  # that group ended with another of its engines
            await self._post(server, "/destroy_weights_update_group", group_name=group)
        self._joined = (server.identity, rendezvous.group)
        await self._post(
            server,
            "/init_weights_update_group",
            master_address=rendezvous.host,
            master_port=rendezvous.port,
            rank_offset=rendezvous.first_rank,
            world_size=rendezvous.num_ranks,
            group_name=rendezvous.group,
            backend=rendezvous.backend,
        )

    async def receive_buckets(self, server: EngineServer, group: str, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            await self._post(
                server,
                "/update_weights_from_distributed",
                names=bucket.names,
                dtypes=[bucket.dtype] * len(bucket.names),
                shapes=bucket.shapes,
                group_name=group,
                load_format="flattened_bucket",
                flush_cache=False,
            )

    async def finish_update(self, server: EngineServer, label: str) -> None:
        await self._post(server, "/end_weight_update")
        await self._post(server, "/update_weight_version", new_version=label, abort_all_requests=False)
        await self._post(server, "/flush_cache")  # it holds keys and values of the old weights
        await self._post(server, "/continue_generation")

    async def loaded_label(self, server: EngineServer) -> str:
        return str((await server.ask("GET", "/model_info", timeout_s=CONTROL_TIMEOUT_S))["weight_version"])

    async def sleep(self, server: EngineServer) -> None:
        await self._post(server, "/release_memory_occupation")

    async def wake(self, server: EngineServer, part: EnginePart) -> None:
        await self._post(server, "/resume_memory_occupation", tags=["kv_cache" if part == "cache" else part])

    async def _post(self, server: EngineServer, path: str, **body: object) -> None:
        await server.ask("POST", path, body, timeout_s=CONTROL_TIMEOUT_S)


class SGLangRollout(ServerEngine):
    api_type = SGLangServer
    capabilities: ClassVar[EngineCapabilities] = BUILT_IN["sglang"]


def _logprobs(meta: Mapping[str, Any]) -> list[float]:
    filtered = meta.get("output_token_sampling_logprobs")
    if filtered is not None:
        return [value[0] if isinstance(value, list) else value for value in filtered]
    return [entry[0] for entry in meta["output_token_logprobs"]]


def _scores(num_tokens: int, meta: Mapping[str, Any], top_k: int, start: int) -> Scores:
    """Row `start` + i of the scores is entry i + 1 of SGLang's answer, whose first entry has no log-probability."""
    scores, rows = no_scores(num_tokens, top_k), slice(start, num_tokens - 1)
    entries = meta["input_token_logprobs"][1:]
    scores.logprobs[rows] = [entry[0] if entry[0] is not None else -math.inf for entry in entries]
    if not top_k:
        return scores
    if "input_top_logprobs_val_flat_b64" in meta:
        scores.top_logprobs[rows] = _array(meta, "val")
        scores.top_ids[rows] = _array(meta, "idx")
        return scores
    for row, found in enumerate(meta["input_top_logprobs"][1:], start):
        for rank, entry in enumerate(found[:top_k]):
            scores.top_logprobs[row, rank], scores.top_ids[row, rank] = entry[0], entry[1]
    return scores


def _hidden(num_tokens: int, meta: Mapping[str, Any], start: int) -> np.ndarray:
    """Hidden states [S, H] from the prompt's last rows: those of a cached prefix do not come, and are 0."""
    states = np.asarray(meta["hidden_states"][0], np.float32)
    if states.ndim != 2 or not num_tokens - start <= len(states) <= num_tokens:
        raise EngineError(
            f"SGLang returned hidden states of shape {list(states.shape)} for {num_tokens} tokens from row {start} on: "
            "a server to attach to needs --chunked-prefill-size -1"
        )
    rows, hidden = slice(start, num_tokens - 1), np.zeros((num_tokens, states.shape[1]), np.float32)
    hidden[rows] = states[start - num_tokens : -1]
    return hidden


def _array(meta: Mapping[str, Any], name: str) -> np.ndarray:
    """Rows of the flat answer [N, K], without those of SGLang's first entries, which have no log-probability."""
    field = f"input_top_logprobs_{name}_flat_b64"
    flat = np.frombuffer(base64.b64decode(meta[field]), np.dtype(meta[f"{field}_dtype"]).newbyteorder("<"))
    rows: np.ndarray = flat.reshape(meta["input_top_logprobs_shape"])[1 - meta["input_top_logprobs_null_prefix"] :]
    return rows
