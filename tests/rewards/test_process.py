from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from tqppo.errors import DataError
from tqppo.rewards.calls import RewardCall
from tqppo.rewards.functions import exact_match
from tqppo.rewards.process import SampleLoop, describe, load_function, send


def sent(message: dict[str, object]) -> object:
    pipe = io.BytesIO()
    send(pipe, message)
    return json.loads(pipe.getvalue())


def test_functions_are_found_by_name_in_files_and_in_modules(tmp_path: Path) -> None:
    (tmp_path / "own_grades.py").write_text("def f(**named):\n    return 1.0\n")
    assert load_function("exact_match") is exact_match
    assert load_function(f"{tmp_path}/own_grades.py:f")() == 1.0
    assert load_function("tqppo.rewards.functions:exact_match") is exact_match
    with pytest.raises(DataError, match="no built-in has this name"):
        load_function("exact")


def test_a_signature_that_does_not_fit_is_refused() -> None:
    RewardCall("exact_match", exact_match, {"ignore_case": True})
    with pytest.raises(DataError, match="cannot be called as"):
        RewardCall("exact_match", exact_match, {"ignore": True})


def test_scalars_of_numpy_are_sent_as_numbers_and_other_objects_as_an_error() -> None:
    assert sent({"id": 1, "value": np.float32(0.5)}) == {"id": 1, "value": 0.5}
    assert "is not a number" in str(sent({"id": 1, "value": object()}))


def test_errors_name_the_line_that_raised() -> None:
    with pytest.raises(ValueError, match="no answer") as raised:
        raise ValueError("no answer")
    assert describe(raised.value).startswith("ValueError: no answer (")
    assert describe(DataError("as it is")) == "as it is"


def test_each_sample_gets_one_answer_also_when_the_function_raises() -> None:
    def grade(*, data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> float:
        return float(solution_str)

    samples = [{"id": i, "source": "s", "solution": text, "answer": "", "extra": {}} for i, text in enumerate("1x")]
    pipe = io.BytesIO()
    SampleLoop(RewardCall("grade", grade), pipe).run(
        io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in samples))
    )
    answers = [json.loads(line) for line in pipe.getvalue().splitlines()]
    assert answers[0] == {"id": 0, "value": 1.0}
    assert "could not convert" in answers[1]["error"]


def test_a_batch_function_gets_all_samples_that_wait_and_one_bad_sample_spoils_no_other() -> None:
    sizes = []

    def grade(completions: list[str], **columns: object) -> list[float]:
        sizes.append(len(completions))
        return [float(text) for text in completions]

    samples = [{"id": i, "source": "s", "solution": text, "answer": "", "extra": {}} for i, text in enumerate("12x")]
    for texts in (samples[:2], samples):
        data, pipe = io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in texts)), io.BytesIO()
        SampleLoop(RewardCall("grade", grade), pipe).run_batches(data, lambda: True)
        answers = [json.loads(line) for line in pipe.getvalue().splitlines()]
        assert [each.get("value") for each in answers] == [1.0, 2.0, None][: len(texts)]
    assert sizes == [2, 3, 1, 1, 1]
