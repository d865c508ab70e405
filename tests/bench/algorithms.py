"""Our maths against verl 0.9.1's on 1024 rows of 1024 response tokens, one thread, forward and backward.

verl is installed apart, without its dependencies, into ~/.cache/tqppo/peers/verl (never into this environment). Both
get the same numbers, every token present and a tenth of them masked: padded [B, T] for verl, flat [N] for us. Results
are compared before they are timed. Each function takes milliseconds for a million tokens, which no step notices, so
ours are written for reading; the ratios show that they stay within a small factor.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, publish
from torch import Tensor

from tqppo.algorithms import advantages as adv
from tqppo.algorithms import balance, correction, kl
from tqppo.algorithms.aggregate import aggregate, normalisers
from tqppo.algorithms.groups import GROUP_ESTIMATORS, RowGroups
from tqppo.algorithms.losses import POLICY_LOSSES, PolicyOptions, PolicyTokens, value_loss

B = T = 1024
GROUP = 8
REPEATS = 25
PEER = Path.home() / ".cache" / "tqppo" / "peers" / "verl"
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # verl's, ours: each returns tensors to compare

torch.manual_seed(0)
MASK = torch.rand(B, T) > 0.1
FLOAT_MASK = MASK.float()
FLAT_MASK, LENGTHS = MASK.reshape(-1), torch.full((B,), T)
REWARD = torch.randint(0, 2, (B,)).float() + 0.1 * torch.rand(B)
TOKEN_REWARDS = torch.zeros(B, T)
TOKEN_REWARDS[torch.arange(B), T - 1 - MASK.int().flip(1).argmax(1)] = REWARD
VALUES, LOGPROBS, ADVANTAGES = torch.randn(B, T), -torch.rand(B, T), torch.randn(B, T)
OLD = LOGPROBS + 0.1 * torch.randn(B, T)
GROUPS = torch.arange(B) // GROUP
UIDS = np.array([f"prompt{int(group)}" for group in GROUPS])
ALWAYS = torch.ones(B, dtype=torch.bool)
ROWS = RowGroups(GROUPS, torch.arange(B), ALWAYS, ~ALWAYS, LENGTHS)


def install_peer() -> None:
    """verl and the two small packages that its maths imports, into their own folder."""
    if not (PEER / "verl").is_dir():
        packages = ["verl==0.9.1", "codetiming", "orjson"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", PEER, *packages], check=True
        )
    sys.path.append(str(PEER))


def keep_memory() -> None:
    """Freed memory stays in the process, for both: otherwise the kernel's page faults are most of what is timed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, at its largest


def estimators(core: Any) -> dict[str, Pair]:
    options = adv.EstimateOptions(gamma=0.99, lam=0.95, single_session="raw")
    config = type("Algorithm", (), {"gamma": 0.99, "get": lambda self, key, default=None: default})()

    flat_values, baseline = VALUES.reshape(-1), 0.5 * REWARD
    inputs = adv.EstimateInputs(REWARD, FLAT_MASK, ROWS, values=flat_values, baseline_reward=baseline)

    def pair(theirs: Callable[..., Any], name: str, **more: Any) -> Pair:
        return (
            lambda: theirs(token_level_rewards=TOKEN_REWARDS, response_mask=FLOAT_MASK, **more)[0] * FLOAT_MASK,
            lambda: adv.estimate(name, inputs, options).advantages,
        )

    grouped = {"index": UIDS, "config": config}
    found = {
        "gae": pair(core.compute_gae_advantage_return, "gae", values=VALUES, gamma=0.99, lam=0.95),
        "reinforce_plus_plus": pair(
            core.compute_reinforce_plus_plus_outcome_advantage, "reinforce_plus_plus", config=config
        ),
        "remax": pair(core.compute_remax_outcome_advantage, "remax", reward_baselines=baseline),
        "group: grpo": pair(core.compute_grpo_outcome_advantage, "grpo", **grouped),
        "group: grpo (verl's vectorised)": pair(core.compute_grpo_vectorized_outcome_advantage, "grpo", **grouped),
        "group: rloo (verl's vectorised)": pair(core.compute_rloo_vectorized_outcome_advantage, "rloo", **grouped),
    }
    for name in ("rloo", "opo", "gpg", "reinforce_plus_plus_baseline"):
        found[f"group: {name}"] = pair(getattr(core, f"compute_{name}_outcome_advantage"), name, **grouped)
    assert {"grpo", "rloo", "opo", "gpg"} <= GROUP_ESTIMATORS.keys()
    return found


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad.reshape(-1)


def losses(core: Any) -> dict[str, Pair]:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
    whole = normalisers(FLAT_MASK, LENGTHS)
    flat_old, flat_advantages = OLD.reshape(-1), ADVANTAGES.reshape(-1)

    def pair(theirs: str, name: str) -> Pair:
        mode = "seq-mean-token-mean" if name in ("geo_mean", "sapo", "gspo") else "token-mean"

        def verl() -> tuple[Tensor, Tensor]:
            leaf = LOGPROBS.clone().requires_grad_()
            loss, _ = core.get_policy_loss_fn(theirs)(OLD, leaf, ADVANTAGES, FLOAT_MASK, mode, config)
            loss.backward()
            return loss.detach(), gradient(leaf)

        def ours() -> tuple[Tensor, Tensor]:
            leaf = LOGPROBS.reshape(-1).clone().requires_grad_()
            tokens = PolicyTokens(leaf, flat_old, flat_advantages, FLAT_MASK, LENGTHS)
            found = POLICY_LOSSES[name](tokens, PolicyOptions())
            loss = aggregate(found.losses, FLAT_MASK, LENGTHS, mode, whole)
            loss.backward()
            return loss.detach(), gradient(leaf)

        return verl, ours

    names = {"vanilla": "ppo"} | {name: name for name in ("gspo", "cispo", "gpg", "geo_mean", "sapo")}
    return {f"loss: {name}": pair(theirs, name) for theirs, name in names.items()} | {
        "loss: value": value_pair(core),
        "loss: kl k3": kl_pair(core),
    }


def value_pair(core: Any) -> Pair:
    whole, returns = normalisers(FLAT_MASK, LENGTHS), ADVANTAGES
    flat_values, flat_returns = VALUES.reshape(-1), returns.reshape(-1)

    def verl() -> tuple[Tensor, Tensor]:
        leaf = OLD.clone().requires_grad_()
        loss, _ = core.compute_value_loss(leaf, returns, VALUES, FLOAT_MASK, 0.5)
        loss.backward()
        return loss.detach(), gradient(leaf)

    def ours() -> tuple[Tensor, Tensor]:
        leaf = OLD.reshape(-1).clone().requires_grad_()
        found = value_loss(leaf, flat_values, flat_returns, FLAT_MASK, clip=0.5)
        loss = aggregate(found.losses, FLAT_MASK, LENGTHS, "token-mean", whole)
        loss.backward()
        return loss.detach(), gradient(leaf)

    return verl, ours


def kl_pair(core: Any) -> Pair:
    whole, flat_old = normalisers(FLAT_MASK, LENGTHS), OLD.reshape(-1)

    def verl() -> tuple[Tensor, Tensor]:
        leaf = LOGPROBS.clone().requires_grad_()
        loss = core.agg_loss(core.kl_penalty(leaf, OLD, "k3"), FLOAT_MASK, "token-mean")
        loss.backward()
        return loss.detach(), gradient(leaf)

    def ours() -> tuple[Tensor, Tensor]:
        leaf = LOGPROBS.reshape(-1).clone().requires_grad_()
        loss = aggregate(kl.estimate("k3", leaf, flat_old, FLAT_MASK), FLAT_MASK, LENGTHS, "token-mean", whole)
        loss.backward()
        return loss.detach(), gradient(leaf)

    return verl, ours


def corrections() -> dict[str, Pair]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    flat_old, flat_new = OLD.reshape(-1), LOGPROBS.reshape(-1)

    def pair(kind: str) -> Pair:
        def ours() -> tuple[Tensor, dict[str, float]]:
            ratio = correction.log_ratios(flat_new, flat_old, FLAT_MASK)
            weights = correction.importance_weights(kind, ratio, FLAT_MASK, LENGTHS, cap=2.0)
            return weights, correction.weight_metrics(weights, FLAT_MASK, FLAT_MASK)

        return (
            lambda: compute_rollout_correction_weights(LOGPROBS - OLD, FLOAT_MASK, kind, 2.0),
            ours,
        )

    return {f"correction: {kind}": pair(kind) for kind in ("token", "sequence")}


def balances() -> dict[str, Pair]:
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    costs = [balance.workload(int(n)) for n in torch.randint(100, 8000, (B,))]
    return {
        "balance: 1024 rows over 8 ranks": (
            lambda: get_seqlen_balanced_partitions(costs, 8, equal_size=True) and None,
            lambda: balance.partition(costs, 8) and None,
        )
    }


def same(theirs: Any, ours: Any) -> None:
    """Tensors agree; what is not a tensor (metrics) is not compared."""
    if isinstance(theirs, tuple):
        for a, b in zip(theirs, ours, strict=True):
            same(a, b)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours.reshape(-1), theirs.reshape(-1), rtol=1e-4, atol=1e-5)


def clock(run: Callable[[], Any], spent: list[float]) -> Callable[[], None]:
    """CPU-seconds of each run: on a busy machine the clock on the wall says more about the neighbours."""

    def timed() -> None:
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)

    return timed


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    install_peer()
    from verl.trainer.ppo import core_algos

    pairs = estimators(core_algos) | losses(core_algos) | corrections() | balances()
    rows, figures = [], {}
    for name, (theirs, ours) in pairs.items():
        same(theirs(), ours())
        spent: dict[str, list[float]] = {"verl": [], "tqppo": []}
        clocked = {who: clock(run, spent[who]) for who, run in (("verl", theirs), ("tqppo", ours))}
        interleaved(clocked, repeats=REPEATS)
        verl_ms, ours_ms = min(spent["verl"]) * 1e3, min(spent["tqppo"]) * 1e3
        rows.append((name, verl_ms, ours_ms, f"{verl_ms / ours_ms:.2f}x"))
        figures[name] = {"verl_ms": verl_ms, "tqppo_ms": ours_ms, "ratio": verl_ms / ours_ms}
    title = f"{B} rows × {T} tokens, one thread, CPU time, best of {REPEATS} interleaved runs"
    publish("algorithms", title, ("function", "verl ms", "tqppo ms", "faster"), rows, figures)


if __name__ == "__main__":
    main()
