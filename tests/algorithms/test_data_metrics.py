from __future__ import annotations

import math

import pytest
import torch

from tqppo.algorithms.advantages import Estimate, EstimateInputs
from tqppo.algorithms.data_metrics import data_metrics
from tqppo.algorithms.groups import RowGroups
from tqppo.protocols import Metrics


def measured(*, max_prompt: int = 8, max_response: int = 3, **columns) -> Metrics:
    """The metrics of `arguments`, some of them given."""
    result = Estimate(columns.pop("advantages"), columns.pop("returns"))
    prompt_lengths = columns.pop("prompt_lengths")
    return data_metrics(
        EstimateInputs(**columns), result, prompt_lengths, max_prompt=max_prompt, max_response=max_response
    )


def arguments(padding: int = 0) -> dict:
    """Session 0 of two rows (2 and 1 tokens), session 1 of one row of 3 tokens, the last masked; then padding."""
    junk = torch.full((padding,), math.nan)
    rows = RowGroups(
        group=torch.tensor([0, 0, 0, *[9] * padding]),
        session=torch.tensor([0, 0, 1, *range(10, 10 + padding)]),
        is_final=torch.tensor([False, True, True, *[True] * padding]),
        is_padding=torch.tensor([False] * 3 + [True] * padding),
        lengths=torch.tensor([2, 1, 3, *[1] * padding]),
    )
    mask = torch.tensor([1, 1, 1, 1, 1, 0, *[0] * padding]).bool()
    tokens = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, math.nan])
    return {
        "reward": torch.cat([torch.tensor([9.0, 1.0, 0.0]), junk]),
        "mask": mask,
        "rows": rows,
        "advantages": torch.cat([tokens, junk]),
        "returns": torch.cat([tokens * 2, junk]),
        "values": torch.cat([tokens, junk]),
        "penalty": torch.cat([torch.full((6,), 0.1), junk]),
        "prompt_lengths": torch.tensor([4, 6, 8, *[1] * padding]),
    }


def test_metrics_worked_by_hand():
    found = measured(**arguments())
    assert found["critic/score/mean"] == 0.5  # per session, by its final row: row 0's 9 counts for no session
    assert found["critic/score/max"] == 1.0
    assert found["critic/rewards/mean"] == pytest.approx(0.5 - 0.5 / 2)  # three and two tokens of 0.1
    assert found["critic/advantages/mean"] == 3.0
    assert found["critic/returns/max"] == 10.0
    assert found["critic/values/min"] == 1.0
    assert found["critic/vf_explained_var"] == pytest.approx(1 - 2.5 / (10 + 1e-5))
    assert found["response_length/mean"] == 2.0
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["prompt_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response/aborted_ratio"] == 0.0


def test_clip_ratio_is_against_the_configured_limit_not_the_longest_row():
    found = measured(**arguments() | {"max_response": 100})
    assert found["response_length/clip_ratio"] == 0.0


def test_padding_rows_change_no_metric():
    assert measured(**arguments(padding=3)) == measured(**arguments())


def test_an_all_padding_batch_says_so_and_nothing_else():
    rows = RowGroups(*(torch.tensor(each) for each in ([0], [0], [True], [True], [1])))
    token = torch.zeros(1)
    found = measured(
        reward=token,
        mask=torch.tensor([False]),
        rows=rows,
        advantages=token,
        returns=token,
        prompt_lengths=torch.tensor([1]),
        max_prompt=1,
        max_response=1,
    )
    assert found == {"padding/all_padding": 1.0}


def test_a_batch_without_a_token_that_counts_leaves_the_token_metrics_out():
    found = measured(**arguments() | {"mask": torch.zeros(6, dtype=torch.bool)})
    assert not any(name.startswith(("critic/advantages", "critic/returns", "critic/values")) for name in found)
    assert not any(math.isnan(value) for value in found.values())


def test_empty_responses_are_counted_and_left_out_of_scores():
    given = arguments()
    rows = given["rows"]
    lengths = torch.tensor([2, 0, 4])
    found = measured(**given | {"rows": RowGroups(rows.group, rows.session, rows.is_final, rows.is_padding, lengths)})
    assert found["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert found["critic/score/mean"] == 0.0
    assert found["response_length_non_aborted/min"] == 2.0
    assert found["response_length/min"] == 0.0
