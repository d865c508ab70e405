from __future__ import annotations

import pytest
import torch

from tqppo.workers.compute.microbatch import MicroBatchCut
from tqppo.workers.compute.worker import followed_by_none, idle_micro_batch, prepare_process
from tqppo.workers.specs import ModelSpec, RoleSpec


def test_a_rank_with_fewer_cuts_gets_none_for_the_rest():
    cuts = [MicroBatchCut.apart(torch.arange(2))]
    assert list(followed_by_none(cuts, 3)) == [cuts[0], None, None]
    assert list(followed_by_none([], 1)) == [None]


def test_an_idle_micro_batch_has_one_position_and_scores_it():
    micro = idle_micro_batch(torch.device("cpu"))
    assert micro.input_ids.shape == (1, 1)
    assert len(micro.outputs) == len(micro.targets) == 1


@pytest.fixture
def _torch_settings():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_torch_settings")
def test_a_workers_process_gets_its_threads_determinism_and_seed():
    spec = RoleSpec(ModelSpec("tiny"), threads=1, seed=7)
    prepare_process(spec, torch.device("cpu"))
    first = torch.rand(3)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    prepare_process(spec, torch.device("cpu"))
    assert torch.equal(torch.rand(3), first)
