"""Measures for `tqppo doctor logprobs`: the config's engine samples, `transformers` in fp32 scores the same tokens."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from tqppo import plugins
from tqppo.config.sections import Config
from tqppo.data.prompts import DataSpec
from tqppo.data.prompts import load as load_prompts
from tqppo.doctor.compare import Mismatch, compare
from tqppo.engines.together import generate_together
from tqppo.protocols import Completion, EngineSpec, Request, Sampling
from tqppo.run import configure
from tqppo.run.build import eos_tokens, prepare_model


def measure(config: Config, *, num_prompts: int, announce: Callable[[str], None] = lambda what: None) -> Mismatch:
    """Sample one completion for each of the first prompts, without top-k and top-p, and compare."""
    hide_progress_bars()
    announce("making the model" if config.model.path == "tiny" else "finding the model")
    with tempfile.TemporaryDirectory(prefix="tqppo-doctor-") as folder:
        model = prepare_model(config, Path(folder) / "model")
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.tokenizer or model, trust_remote_code=config.model.trust_remote_code
        )
        engine = engine_spec(config, model, tokenizer, Path(folder) / "logs")
        prompts = load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed)
        tokens = [prompts.prompt(index).tokens for index in range(min(num_prompts, len(prompts)))]
        sampling = replace(configure.sampling(config), top_p=1.0, top_k=0)
        announce(f"starting the {config.rollout.backend} engine and sampling")
        completions = asyncio.run(_sample(config.rollout.backend, engine, tokens, sampling))
        announce(f"scoring {sum(len(each.tokens) for each in completions)} tokens with the trainer's model")
        trainer = trainer_logprobs(model, tokens, completions, temperature=sampling.temperature)
    return compare(
        [completion.logprobs for completion in completions],
        trainer,
        tokens=[completion.tokens for completion in completions],
        decode=lambda ids: str(tokenizer.decode(ids)),
    )


def hide_progress_bars() -> None:
    """Loading a model draws no bars between the lines of a report."""
    hide: Callable[[], None] = logging.disable_progress_bar
    hide()


def engine_spec(config: Config, model: str, tokenizer: PreTrainedTokenizerBase, logs: Path) -> EngineSpec:
    paths = configure.RunPaths(model, config.model.tokenizer or model, logs, publish="")
    engine = configure.rollout_spec(config, paths, eos_tokens(tokenizer)).engine
    return replace(engine, endpoint=config.rollout.endpoints[0]) if config.rollout.endpoints else engine


async def _sample(backend: str, spec: EngineSpec, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
    engine = plugins.load("rollout", backend)(spec)
    try:
        await engine.start()
        requests = [Request(tokens, sampling, i, f"doctor-{i}", (i,)) for i, tokens in enumerate(prompts)]
        return await generate_together(engine, requests)
    finally:
        await engine.close()


@torch.no_grad()
def trainer_logprobs(
    model: str, prompts: Sequence[list[int]], completions: Sequence[Completion], *, temperature: float
) -> list[list[float]]:
    """Log-probabilities of the sampled tokens by a plain forward in fp32, one sequence at a time."""
    forward = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train(False)
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        sampled = torch.tensor(completion.tokens)  # [R]
        logits = forward(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]  # [R, V]
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        found.append(logprobs.gather(1, sampled[:, None])[:, 0].tolist())
    return found
