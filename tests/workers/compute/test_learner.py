"""Figures of an update, summed over its micro-batches."""

from __future__ import annotations

import torch

from tqppo.workers.compute.learner import Loss, Tally


def test_shares_of_a_loss_add_up_and_sums_are_per_token() -> None:
    tally = Tally()
    for share in (0.25, 0.5):
        value = torch.tensor(share)
        tally.add(Loss(value, {"actor/pg_loss": value}, {"actor/ppo_kl": torch.tensor(6.0)}), tokens=24.0)
    assert dict(tally.totals) == {"actor/pg_loss": 0.75, "actor/ppo_kl": 0.5}
