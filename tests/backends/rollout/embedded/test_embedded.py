"""The embedded engine beyond the contract: determinism, late admission, compaction, weights, failures."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tqppo import plugins
from tqppo.engines.together import generate_together
from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineSpec, Request, Sampling, WeightSource
from tqppo.tiny.model import tiny_config, write_tiny_model
from tqppo.weights.checksum import checksum

EOS = 256


def make(folder: Path, **fields: Any) -> Any:
    settings = {"max_context_tokens": 256, "eos_token_ids": (EOS,), "name": "replica"} | fields
    return plugins.load("rollout", "embedded")(EngineSpec(model=str(folder), **settings))


def drive(folder: Path, work: Callable[[Any], Coroutine[Any, Any, Any]], **fields: Any) -> Any:
    """Start an engine, do the work, close it; nothing may take longer than a minute."""

    async def session() -> Any:
        engine = make(folder, **fields)
        await engine.start()
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(session())


def requests(count: int, *, longest: int = 30, most: int = 20, seed: int = 0) -> list[Request]:
    """Mixed lengths; every other prompt is one that came before."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, longest + 1))] for _ in range((count + 1) // 2)] * 2
    return [
        Request(
            prompt, Sampling(max_new_tokens=rng.randrange(1, most + 1)), rng.randrange(2**64), f"r{i}", (i,), f"s{i}"
        )
        for i, prompt in enumerate(prompts[:count])
    ]


def assert_exact(folder: Path, asked: list[Request], got: list[Completion]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, completion in zip(asked, got, strict=True):
        tokens = torch.tensor([[*request.tokens, *completion.tokens]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, len(request.tokens) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        limit = min(request.sampling.max_new_tokens, 256 - len(request.tokens))
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == EOS else "length")
        assert len(completion.tokens) == limit or completion.finish_reason == "stop"


async def all_of(engine: Any, asked: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in asked)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2"])
def test_every_family_decodes_exactly(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family=family)
    asked = requests(24)
    assert_exact(folder, asked, drive(folder, lambda engine: all_of(engine, asked)))


def test_grouped_key_value_heads_decode_exactly(tmp_path: Path) -> None:
    config = tiny_config(family="qwen2", hidden_size=128, num_layers=2, num_heads=4, tie_embeddings=True)
    config.num_key_value_heads = 2
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    asked = requests(24)
    assert_exact(tmp_path, asked, drive(tmp_path, lambda engine: all_of(engine, asked)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_positions_decode_exactly(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = tiny_config(family="llama", hidden_size=64, num_layers=2, num_heads=2, tie_embeddings=True)
    config.rope_parameters = {"rope_theta": 10000.0} | rope
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    asked = requests(12, longest=90)
    assert_exact(tmp_path, asked, drive(tmp_path, lambda engine: all_of(engine, asked)))


@pytest.mark.parametrize("bias", [False, True])
def test_biases_and_norms_that_differ_from_their_first_values_decode_exactly(tmp_path: Path, bias: bool) -> None:
    config = tiny_config(family="llama", hidden_size=64, num_layers=3, num_heads=2, tie_embeddings=False)
    config.attention_bias = config.mlp_bias = bias
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    asked = requests(24)
    assert_exact(tmp_path, asked, drive(tmp_path, lambda engine: all_of(engine, asked)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_transformers_can_be_asked_for(tiny_model: Path, attention: str) -> None:
    asked = requests(12)
    got = drive(tiny_model, lambda engine: all_of(engine, asked), attention=attention)
    assert_exact(tiny_model, asked, got)


@pytest.fixture(scope="module")
def narrow_engine(tiny_model: Path) -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """Five rows at a time, so that requests leave and come while others decode."""
    loop = asyncio.new_event_loop()
    engine = make(tiny_model, max_running=5)
    loop.run_until_complete(engine.start())
    yield engine, loop
    loop.run_until_complete(engine.close())
    loop.close()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrival=st.permutations(range(16)), pauses=st.lists(st.integers(0, 4), min_size=16, max_size=16))
def test_timing_and_arrival_order_do_not_change_a_byte(
    narrow_engine: tuple[Any, asyncio.AbstractEventLoop], arrival: list[int], pauses: list[int]
) -> None:
    engine, loop = narrow_engine
    asked = requests(16)

    async def late(place: int) -> Completion:
        for _ in range(pauses[place]):
            await asyncio.sleep(0)
        return await engine.generate(asked[place])

    async def round_of(places: list[int], wait: bool) -> list[Completion]:
        engine.expect([asked[place].session for place in places])
        work = [late(place) if wait else engine.generate(asked[place]) for place in places]
        got = await asyncio.wait_for(asyncio.gather(*work), 60)
        for request in asked:
            engine.end_session(request.session)
        return [got[places.index(place)] for place in range(len(places))]

    in_order = loop.run_until_complete(round_of(list(range(16)), wait=False))
    assert loop.run_until_complete(round_of(list(arrival), wait=True)) == in_order


def test_cohorts_that_overlap_do_not_mix(tiny_model: Path) -> None:
    first, second = (
        requests(8),
        [Request(r.tokens, r.sampling, r.seed, f"b{r.request_id}", r.order) for r in requests(8)],
    )

    async def work(engine: Any) -> None:
        alone = await generate_together(engine, first)
        running = asyncio.ensure_future(generate_together(engine, first))
        for _ in range(30):
            await asyncio.sleep(0)  # every request has arrived, none has finished
        assert await generate_together(engine, second) == alone
        assert await running == alone

    drive(tiny_model, work)


@pytest.mark.parametrize("deterministic", [True, False])
def test_requests_that_come_while_others_decode_are_exact(tiny_model: Path, deterministic: bool) -> None:
    """Long outputs and late long prompts: rows move, the cache grows, and its window moves both ways."""
    asked = requests(28, longest=90, most=150, seed=3)

    async def work(engine: Any) -> list[Completion]:
        async def late(place: int) -> Completion:
            for _ in range(place * 8):
                await asyncio.sleep(0)
            return await engine.generate(asked[place])

        return list(await asyncio.gather(*(late(place) for place in range(len(asked)))))

    got = drive(tiny_model, work, deterministic=deterministic, max_running=12)
    assert_exact(tiny_model, asked, got)


def test_a_random_number_depends_on_the_seed_and_the_place_alone(tiny_model: Path) -> None:
    asked = requests(30)

    async def work(engine: Any) -> None:
        together = await all_of(engine, asked)
        alone = [await engine.generate(request) for request in asked]
        assert [c.tokens for c in alone] == [c.tokens for c in together]

    drive(tiny_model, work)


def test_a_context_that_is_full_ends_the_completion(tiny_model: Path) -> None:
    asked = Request([1] * 250, Sampling(max_new_tokens=100), 0, "a")
    got = drive(tiny_model, lambda engine: engine.generate(asked))
    assert len(got.tokens) == 6 or got.finish_reason == "stop"


# What was announced and does not come.


def test_the_end_of_a_session_that_never_asked_lets_the_others_go(tiny_model: Path) -> None:
    async def work(engine: Any) -> list[Completion]:
        engine.expect([f"s{i}" for i in range(5)])
        running = asyncio.ensure_future(all_of(engine, requests(3)))
        await asyncio.sleep(0.05)
        assert not running.done()
        engine.end_session("s3")
        engine.end_session("s4")
        return await running

    assert len(drive(tiny_model, work)) == 3


def test_a_refused_request_does_not_hold_its_batch_up(tiny_model: Path) -> None:
    async def work(engine: Any) -> list[Completion]:
        good = requests(2)
        engine.expect(["s0", "s1", "long"])
        running = asyncio.ensure_future(all_of(engine, good))
        with pytest.raises(EngineError, match="300 tokens were given; replica takes 1 to 255"):
            await engine.generate(Request([1] * 300, Sampling(), 0, "long", session="long"))
        engine.end_session("long")
        return await running

    assert len(drive(tiny_model, work)) == 2


def test_waiting_for_the_announced_ends_at_the_deadline(tiny_model: Path) -> None:
    async def work(engine: Any) -> None:
        engine.expect(["s0", "s1", "s2"])
        await all_of(engine, requests(2))

    with pytest.raises(
        EngineError, match=r"waited 0\.1 s for the announced sessions s2, which neither asked nor ended"
    ):
        drive(tiny_model, work, request_timeout_s=0.1)


def test_an_engine_that_is_not_deterministic_ignores_announcements(tiny_model: Path) -> None:
    async def work(engine: Any) -> list[Completion]:
        engine.expect([f"s{i}" for i in range(50)])
        return await all_of(engine, requests(3))

    assert len(drive(tiny_model, work, deterministic=False)) == 3


# Ending early.


def test_a_cancelled_caller_frees_its_row_and_leaves_the_others_alone(tiny_model: Path) -> None:
    long = Request([5, 6], Sampling(temperature=0, max_new_tokens=250), 0, "long")
    asked = requests(6)

    async def work(engine: Any) -> list[Completion]:
        task = asyncio.ensure_future(engine.generate(long))
        running = asyncio.ensure_future(all_of(engine, asked))
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        got = await running
        assert task.cancelled()
        await engine.generate(long)  # its name is free again
        return got

    assert_exact(tiny_model, asked, drive(tiny_model, work))


def test_a_waiting_request_can_be_aborted(tiny_model: Path) -> None:
    async def work(engine: Any) -> Completion:
        engine.expect(["s0", "s1"])
        task = asyncio.ensure_future(engine.generate(requests(1)[0]))
        await asyncio.sleep(0)
        await engine.abort("r0")
        return await task

    assert drive(tiny_model, work) == Completion([], [], "abort", 0)


def test_closing_fails_waiting_callers_and_leaves_no_thread(tiny_model: Path) -> None:
    before = threading.active_count()

    async def work(engine: Any) -> None:
        running = asyncio.ensure_future(all_of(engine, requests(4, most=200)))
        scores = asyncio.ensure_future(engine.score([1, 2, 3]))
        await asyncio.sleep(0)
        await engine.close()
        for task in (running, scores):
            with pytest.raises(EngineError, match="closed"):
                await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(requests(1)[0])

    drive(tiny_model, work)
    assert threading.active_count() == before


def test_a_large_model_computes_in_a_thread_and_is_as_exact(tiny_model: Path) -> None:
    asked = requests(20)

    async def work(engine: Any) -> list[Completion]:
        engine._num_parameters = 10**12  # what decides it is the size
        return await all_of(engine, asked)

    assert_exact(tiny_model, asked, drive(tiny_model, work))


# Weights.


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update(other=torch.zeros(1)), "not in the model: other"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is \[3\], the model has \[64\]",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tiny_model: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    wrong = changed(tiny_model, tmp_path / "wrong", change)

    async def work(engine: Any) -> Completion:
        with pytest.raises(EngineError, match=message):
            await engine.load_weights(WeightSource(str(wrong), 7))
        return await engine.generate(requests(1)[0])

    assert drive(tiny_model, work).weight_version == 0


@pytest.mark.parametrize("content", [None, b"", b"\x05\0\0\0\0\0\0\0hello", b"\xff" * 20], ids=repr)
def test_a_file_that_is_not_safetensors_is_refused_by_path(
    tiny_model: Path, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)

    async def work(engine: Any) -> None:
        await engine.load_weights(WeightSource(str(tmp_path), 1))

    with pytest.raises(EngineError, match=str(tmp_path)):
        drive(tiny_model, work)


def test_weights_updated_in_place_are_seen_without_a_copy(tiny_model: Path, tmp_path: Path) -> None:
    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] *= 3

    published = changed(tiny_model, tmp_path / "published", lambda tensors: None)
    new = changed(tiny_model, tmp_path / "new", scale)
    asked = requests(4)

    async def work(engine: Any) -> list[Completion]:
        await engine.load_weights(WeightSource(str(published), 1))
        before = await all_of(engine, asked)
        with (published / "model.safetensors").open("r+b") as file:
            file.write((new / "model.safetensors").read_bytes())
        await engine.load_weights(WeightSource(str(published), 2))
        after = await all_of(engine, asked)
        assert [c.weight_version for c in before + after] == [1] * 4 + [2] * 4
        assert [c.logprobs for c in before] != [c.logprobs for c in after]
        return after

    got = drive(tiny_model, work)
    for name in ("config.json",):
        (new / name).write_bytes((tiny_model / name).read_bytes())
    assert_exact(new, asked, got)


def test_weights_with_other_bits_than_were_published_are_named(tiny_model: Path, tmp_path: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1

    published = changed(tiny_model, tmp_path / "published", lambda tensors: None)
    flipped = changed(tiny_model, tmp_path / "flipped", flip)
    checksums = {name: checksum(tensor) for name, tensor in load_file(published / "model.safetensors").items()}

    async def work(engine: Any) -> None:
        await engine.load_weights(WeightSource(str(published), 1, checksums=checksums))
        with pytest.raises(EngineError, match=r"does not have the weights that were published: model\.norm\.weight of"):
            await engine.load_weights(WeightSource(str(flipped), 2, checksums=checksums))

    drive(tiny_model, work)


def test_new_weights_wait_for_requests_no_longer_than_a_request_may_take(tiny_model: Path) -> None:
    async def work(engine: Any) -> None:
        advance = engine._decoder.advance

        def slowly(tickets: Any) -> Any:
            time.sleep(0.05)
            return advance(tickets)

        engine._decoder.advance = slowly
        running = asyncio.ensure_future(all_of(engine, [Request([1], Sampling(max_new_tokens=200), 0, "long")]))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match=r"1 requests had not finished 0.3 s after new weights"):
            await engine.load_weights(WeightSource(str(tiny_model), 5))
        engine._decoder.advance = advance
        (completion,) = await running
        assert completion.weight_version == 0
        assert (await engine.generate(Request([1], Sampling(max_new_tokens=2), 0, "next"))).weight_version == 0

    drive(tiny_model, work, request_timeout_s=0.3)


def test_requests_in_flight_finish_with_the_weights_they_began_with(tiny_model: Path, tmp_path: Path) -> None:
    new = changed(tiny_model, tmp_path / "new", lambda tensors: tensors["model.norm.weight"].mul_(3))
    asked = requests(6, most=60)

    async def work(engine: Any) -> list[Completion]:
        running = asyncio.ensure_future(all_of(engine, asked))
        for _ in range(5):
            await asyncio.sleep(0)
        loading = asyncio.ensure_future(engine.load_weights(WeightSource(str(new), 5)))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(engine.generate(Request([1, 2], Sampling(max_new_tokens=2), 0, "later")))
        await loading
        assert running.done()
        assert (await later).weight_version == 5
        return await running

    got = drive(tiny_model, work)
    assert {completion.weight_version for completion in got} == {0}
    assert_exact(tiny_model, asked, got)


def test_weights_that_are_not_finite_fail_the_requests_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    broken = changed(tiny_model, tmp_path / "broken", lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))

    async def work(engine: Any) -> Completion:
        await engine.load_weights(WeightSource(str(broken), 1))
        got = await asyncio.gather(*(engine.generate(r) for r in requests(4)), return_exceptions=True)
        assert all("not finite numbers (weights of version 1)" in str(error) for error in got)
        await engine.load_weights(WeightSource(str(tiny_model), 2))
        return await engine.generate(requests(1)[0])

    assert drive(tiny_model, work).weight_version == 2


# Misuse.


def test_a_sleeping_engine_refuses_requests(tiny_model: Path) -> None:
    async def work(engine: Any) -> Completion:
        await engine.sleep()
        with pytest.raises(EngineError, match="replica is asleep"):
            await engine.generate(requests(1)[0])
        await engine.wake()
        return await engine.generate(requests(1)[0])

    assert drive(tiny_model, work).tokens


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], Sampling(), 0, "a"), "0 tokens were given"),
        (Request([264], Sampling(), 0, "a"), "token ids must be 0 to 263"),
        (Request([1], Sampling(max_new_tokens=0), 0, "a"), "max_new_tokens is 0"),
        (Request([1], Sampling(top_p=0), 0, "a"), "top_p"),
    ],
    ids=["empty", "vocabulary", "length", "top_p"],
)
def test_a_request_that_makes_no_sense_is_refused(tiny_model: Path, request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        drive(tiny_model, lambda engine: engine.generate(request_))


def test_two_running_requests_cannot_share_a_name(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="'r0' is still running"):
        drive(tiny_model, lambda engine: all_of(engine, requests(1) * 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_args": {"gpu": 1}}, "no engine_args gpu"),
        ({"engine_args": {"device": "cuda"}}, "sees no GPU here"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"max_context_tokens": 10**6}, "has only 4096 positions"),
    ],
    ids=["argument", "device", "dtype", "context"],
)
def test_a_spec_that_cannot_work_is_refused_at_the_start(
    tiny_model: Path, fields: dict[str, Any], message: str
) -> None:
    async def start() -> None:
        engine = make(tiny_model, **fields)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=message):
        asyncio.run(start())


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="replica cannot load the model"):
        drive(tmp_path, lambda engine: engine.score([1]))
