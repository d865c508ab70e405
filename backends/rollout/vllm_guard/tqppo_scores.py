"""Runs inside the vLLM server: a route that answers scores as arrays, because top-k as JSON costs kilobytes a token.

`POST /tqppo/score` with `{"token_ids", "top_k", "start", "request_id"}` answers N = tokens - 1 - start rows as arrays:
float32 [N], int32 [N, K], float32 [N, K], little-endian. `server/scores.py` reads them. A `GET` of the route answers
200, so that a client can tell whether a server has it, or 404 if this vLLM has no flat log-probabilities.
"""

import asyncio
import json
from typing import Any

import numpy as np

PATH = "/tqppo/score"


class ScoreRoute:
    """ASGI middleware; all other routes pass through it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
        elif scope["method"] == "GET":
            await answer(send, 200 if is_supported() else 404, b"")
        else:
            body = json.loads(await read(receive))
            work = asyncio.ensure_future(score(scope["app"].state.engine_client, body))
            gone = asyncio.ensure_future(receive())  # its next message is that the client has disconnected
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                work.cancel()  # vLLM then aborts the request
                return
            await respond(send, work)


async def respond(send: Any, work: "asyncio.Future[bytes]") -> None:
    try:
        content = work.result()
    except ValueError as refusal:  # too long, or a token beyond the vocabulary
        await answer(send, 400, str(refusal).encode())
        return
    await answer(send, 200, content)


def is_supported() -> bool:
    from vllm import SamplingParams

    return hasattr(SamplingParams, "flat_logprobs")


async def score(engine: Any, body: dict[str, Any]) -> bytes:
    from vllm import SamplingParams

    # Flat log-probabilities are lists of numbers instead of a dictionary of objects per token.
    params = SamplingParams(
        temperature=1.0, max_tokens=1, prompt_logprobs=body["top_k"], flat_logprobs=True, detokenize=False
    )
    outputs = engine.generate({"prompt_token_ids": body["token_ids"]}, params, body["request_id"])
    last = [output async for output in outputs][-1]
    return pack(last.prompt_logprobs, body["top_k"], body["start"])


def pack(flat: Any, top_k: int, start: int) -> bytes:
    """Each position but the first, which is empty, has 1 + K entries: the chosen token and the K likeliest."""
    first = start * (1 + top_k)
    ids = np.array(flat.token_ids[first:], "<i4").reshape(-1, 1 + top_k)
    logprobs = np.array(flat.logprobs[first:], "<f4").reshape(-1, 1 + top_k)
    return logprobs[:, 0].tobytes() + ids[:, 1:].tobytes() + logprobs[:, 1:].tobytes()


async def read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def answer(send: Any, status: int, content: bytes) -> None:
    kind = b"application/octet-stream" if status == 200 else b"text/plain"
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
