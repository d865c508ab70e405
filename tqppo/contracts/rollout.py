"""The contract of a rollout engine as tests. The reference is an fp32 forward of the same weights by `transformers`.

`tqppo backends check rollout NAME` runs them on one engine. A test file may import everything from here and redefine
the fixtures `backend_name`, `engine_options` and `tolerance`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tqppo.contracts.rollout_scores import *  # noqa: F403
from tqppo.contracts.rollout_subject import *  # noqa: F403
from tqppo.contracts.rollout_subject import EOS, MAX_CONTEXT, Fields, Subject, prompts, request, sampling_logprobs
from tqppo.errors import EngineError
from tqppo.protocols import Completion, Request, Sampling
from tqppo.tiny.model import write_tiny_model

# Requests of one batch. Greedy has no filters, because engines differ in whether filters change its logprobs.
MIXED: tuple[Fields, ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 10},
    {"temperature": 0.7, "top_k": 10},
    {},
)


def assert_exact(subject: Subject, requests: Sequence[Request], tolerance: float) -> list[Completion]:
    completions = subject.generate(*requests)
    for asked, got in zip(requests, completions, strict=True):
        assert len(got.tokens) == len(got.logprobs) >= 1
        difference = (torch.tensor(got.logprobs) - subject.expected_logprobs(asked, got)).abs().max()
        assert difference <= tolerance, f"log-probabilities are {difference:.2g} away from a plain forward: {asked}"
    return completions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(
    subject: Subject, tolerance: float, temperature: float
) -> None:
    requests = [
        request(prompt, seed=i, temperature=temperature, max_new_tokens=12) for i, prompt in enumerate(prompts(8))
    ]
    assert_exact(subject, requests, tolerance)


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}], ids=str
)
def test_logprobs_are_renormalised_over_what_top_k_and_top_p_leave(
    subject: Subject, tolerance: float, filters: Fields
) -> None:
    requests = [request(prompt, seed=i, max_new_tokens=8, **filters) for i, prompt in enumerate(prompts(6))]
    completions = assert_exact(subject, requests, tolerance)
    assert all(np.isfinite(completion.logprobs).all() for completion in completions)


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_1(subject: Subject, tolerance: float) -> None:
    requests = [request(prompt, seed=i, temperature=0.0, max_new_tokens=8) for i, prompt in enumerate(prompts(6))]
    for asked, got in zip(requests, assert_exact(subject, requests, tolerance), strict=True):
        logits = subject.logits([*asked.tokens, *got.tokens])[len(asked.tokens) - 1 : -1]
        assert got.tokens == logits.argmax(-1).tolist()


def test_one_seed_gives_one_completion(subject: Subject) -> None:
    prompt = prompts(1)[0]
    first, second = (subject.generate(request(prompt, seed=5, max_new_tokens=12))[0] for _ in range(2))
    assert first.tokens == second.tokens


def test_identical_prompts_with_different_seeds_differ(subject: Subject, tolerance: float) -> None:
    requests = [request(prompts(1)[0], seed=seed, max_new_tokens=12) for seed in range(8)]
    completions = assert_exact(subject, requests, tolerance)
    assert len({tuple(completion.tokens) for completion in completions}) >= 7


def test_samples_follow_the_distribution(subject: Subject) -> None:
    prompt = prompts(1)[0]
    requests = [request(prompt, seed=seed, top_k=4, max_new_tokens=1) for seed in range(400)]
    sampled = [completion.tokens[0] for completion in subject.generate(*requests)]
    expected = sampling_logprobs(subject.logits(prompt)[-1:], Sampling(top_k=4))[0].exp()
    frequencies = torch.tensor(np.bincount(sampled, minlength=len(expected)) / len(sampled))
    assert (frequencies - expected).abs().max() < 0.12  # five standard deviations


def test_a_stop_token_ends_the_completion_and_is_part_of_it(subject: Subject, tolerance: float) -> None:
    prompt = prompts(1)[0]
    free = subject.generate(request(prompt, seed=3, max_new_tokens=12))[0]
    stop = free.tokens[len(free.tokens) // 2]
    asked = request(prompt, seed=3, max_new_tokens=12, stop_token_ids=(stop,))
    stopped = assert_exact(subject, [asked], tolerance)[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_the_end_token_of_the_spec_stops(subject: Subject) -> None:
    completions = subject.generate(*(request(prompts(1)[0], seed=seed, max_new_tokens=100) for seed in range(16)))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped, "100 tokens of 16 samples without one end token"
    assert all(completion.tokens[-1] == EOS for completion in stopped)
    assert all(EOS not in completion.tokens[:-1] for completion in completions)


def test_the_length_limit_is_kept_and_named(subject: Subject) -> None:
    completions = subject.generate(*(request(p, seed=i, max_new_tokens=i + 1) for i, p in enumerate(prompts(6))))
    for i, completion in enumerate(completions):
        assert len(completion.tokens) <= i + 1
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == EOS else "length")


def test_many_requests_at_once_each_get_their_own_answer(subject: Subject, tolerance: float) -> None:
    rng = random.Random(7)
    requests = [
        request(
            prompt,
            seed=rng.randrange(2**63),
            order=(i,),
            **rng.choice(MIXED),
            max_new_tokens=rng.randrange(1, 30),
        )
        for i, prompt in enumerate(prompts(48, longest=60, seed=3))
    ]
    assert_exact(subject, requests, tolerance)


def test_a_deterministic_engine_gives_the_same_bytes_whatever_the_arrival_order(subject: Subject) -> None:
    if not subject.engine.capabilities.deterministic:
        return
    asked = [request(p, seed=i, order=(i,), max_new_tokens=10) for i, p in enumerate(prompts(20))]
    shuffled = random.Random(1).sample(asked, len(asked))
    by_id = dict(zip((r.request_id for r in shuffled), subject.generate(*shuffled), strict=True))
    assert subject.generate(*asked) == [by_id[r.request_id] for r in asked]


def test_abort_ends_a_request_early_with_what_it_has(subject: Subject) -> None:
    asked = request(endless_prompt(subject), temperature=0.0, max_new_tokens=400)

    async def work() -> Completion:
        task = asyncio.ensure_future(subject.engine.generate(asked))
        await asyncio.sleep(0.05)
        await subject.engine.abort(asked.request_id)
        return await task

    completion = subject.run(work())
    assert completion.finish_reason == "abort"
    assert len(completion.tokens) == len(completion.logprobs) < 400
    again = subject.generate(request(asked.tokens, max_new_tokens=4, temperature=0.0))[0]
    assert again.finish_reason == "length", "the engine must still work"


def endless_prompt(subject: Subject) -> list[int]:
    """A prompt that greedy decoding continues for long without the end token."""
    for prompt in prompts(50, seed=11):
        tokens = list(prompt)
        for _ in range(24):
            tokens.append(int(subject.logits(tokens)[-1].argmax()))
        if EOS not in tokens:
            return prompt
    raise AssertionError("every prompt of this model ends early")


def test_aborting_an_unknown_request_does_nothing(subject: Subject) -> None:
    subject.run(subject.engine.abort("no such request"))


def test_loaded_weights_are_used_and_their_version_is_echoed(
    subject: Subject, tolerance: float, tmp_path: Path
) -> None:
    check_updates(subject, tolerance, tmp_path, tie_embeddings=True)


def test_loaded_weights_are_used_by_a_model_with_a_head_of_its_own(
    untied_subject: Subject, tolerance: float, tmp_path: Path
) -> None:
    check_updates(untied_subject, tolerance, tmp_path, tie_embeddings=False)


def check_updates(subject: Subject, tolerance: float, folder: Path, *, tie_embeddings: bool) -> None:
    """Load weights three times and check each: an engine may accept weights but keep using old ones or old caches."""
    prompt = prompts(1, longest=60, seed=9)[0] * 4  # long enough to be in a prefix cache
    family = subject.reference.config.model_type
    for update in range(3):
        before = subject.logits(prompt)[-1].log_softmax(-1)
        weights = write_tiny_model(
            folder / str(update), family=family, tie_embeddings=tie_embeddings, seed=100 + update
        )
        publish_head(weights)
        subject.load(weights)
        assert (subject.logits(prompt)[-1].log_softmax(-1) - before).abs().max() > 0.01, "the weights must differ"
        asked = [request(prompt, seed=i, max_new_tokens=6) for i in range(4)]
        completions = assert_exact(subject, asked, tolerance)
        assert {completion.weight_version for completion in completions} == {subject.version}


def publish_head(folder: Path) -> None:
    """Add the head to a folder with tied embeddings, as a published folder has it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(subject: Subject) -> None:
    with pytest.raises(EngineError, match=str(MAX_CONTEXT)):
        subject.generate(request([65] * (MAX_CONTEXT + 1), max_new_tokens=1))
    assert subject.generate(request([65, 66], max_new_tokens=1)), "the engine must still work"


def test_sleep_and_wake_leave_the_engine_as_it_was(subject: Subject, tolerance: float) -> None:
    asked = request(prompts(1)[0], seed=2, max_new_tokens=6)
    before = subject.generate(asked)[0]
    subject.run(subject.engine.sleep())
    assert subject.engine.held_bytes() == 0, "an engine that sleeps holds no memory of the device"
    subject.run(subject.engine.wake(cache=False))  # as before new weights
    subject.run(subject.engine.wake())
    after = assert_exact(subject, [request(asked.tokens, seed=2, max_new_tokens=6)], tolerance)[0]
    assert after.tokens == before.tokens
    assert after.weight_version == before.weight_version
