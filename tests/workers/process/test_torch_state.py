"""Roles that share a process do not see each other's settings of torch."""

from __future__ import annotations

import torch

from tqppo.workers.process.torch_state import TorchState


def test_each_role_has_its_own_threads_determinism_and_random_numbers() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    actor, critic = TorchState(), TorchState()
    with actor:
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(7)
        first = torch.rand(3)
    with critic:
        torch.manual_seed(7)
        assert torch.rand(3).equal(first)
        assert not torch.are_deterministic_algorithms_enabled()
    with actor:
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
        second = torch.rand(3)
    with critic:
        assert torch.rand(3).equal(second), "as if the other had drawn nothing"
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.get_rng_state().equal(before[2])
