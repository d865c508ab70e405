"""Programs against tests: what counts as the program, which forms tests have, and limits that hold."""

from __future__ import annotations

import time

import pytest

from tqppo.errors import DataError
from tqppo.rewards.code import ProgramTest, passes, program_in, read_tests
from tqppo.rewards.functions import code, json_schema, length

ANSWER = "First\n```python\nnothing\n```\nbetter:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
ECHO = "print(int(input()) * 2)"


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_in(ANSWER) == "def double(x):\n    return 2 * x\n"
    assert program_in("x = 1") == "x = 1"


def test_tests_are_read_in_the_forms_that_datasets_have() -> None:
    assert read_tests("assert f(1)") == [ProgramTest("assert f(1)")]
    assert read_tests(["assert a", "assert b"]) == [ProgramTest("assert a"), ProgramTest("assert b")]
    expected = [ProgramTest(stdin="1\n2", stdout="3")]
    assert read_tests({"inputs": [["1", "2"]], "outputs": [3]}) == expected
    assert read_tests('[{"input": "1\\n2", "output": "3"}]') == expected
    with pytest.raises(DataError, match="needs tests as the answer"):
        read_tests(None)


@pytest.mark.parametrize("truth", ["4", ["assert f(1)", "x = 1"], '["pass"]'])
def test_a_test_that_cannot_fail_is_no_test(truth: object) -> None:
    with pytest.raises(DataError, match="nothing in the test can fail"):
        read_tests(truth)


def test_a_test_that_is_not_python_stays_one_that_no_program_passes() -> None:
    assert read_tests("assert f(") == [ProgramTest("assert f(")]


@pytest.mark.slow
def test_a_program_is_scored_by_asserts_and_by_its_output() -> None:
    assert code("s", ANSWER, "assert double(2) == 4")["score"] == 1.0
    assert code("s", ANSWER, ["assert double(2) == 4", "assert double(2) == 5"])["score"] == 0.0
    assert code("s", ANSWER, ["assert double(2) == 4", "assert double(2) == 5"], partial=True)["score"] == 0.5
    assert code("s", ECHO, {"inputs": ["4\n", "5"], "outputs": ["8", "10\n"]})["score"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(4 << 30)",
        "import sys; sys.exit(1)",
        "open('big', 'wb').write(bytes(9 << 20))",
    ],
    ids=["endless", "memory", "exit", "disk"],
)
def test_a_program_beyond_its_limits_fails(program: str) -> None:
    begun = time.monotonic()
    assert not passes(program, ProgramTest("pass"), timeout_s=3.0, memory_mb=512)
    assert time.monotonic() - begun < 60


def test_json_fits_its_schema() -> None:
    schema = {"type": "object", "required": ["name"]}
    assert json_schema("s", '```json\n{"name": "x"}\n```', None, schema=schema)["score"] == 1.0
    assert json_schema("s", '{"n": "x"}', schema)["score"] == 0.0
    assert json_schema("s", "not json", None)["score"] == 0.0
    with pytest.raises(DataError, match="the schema is not valid"):
        json_schema("s", "1", None, schema={"type": "no such type"})


def test_a_length_within_bounds_scores_one_and_falls_outside() -> None:
    assert length("s", "a b c", None, least=2, most=4)["score"] == 1.0
    assert length("s", "a", None, least=2, most=4)["score"] == 0.5
    assert length("s", "a b c d e f g h", None, most=4)["score"] == 0.5
    assert length("s", "four", None, most=4, unit="characters")["score"] == 1.0
    with pytest.raises(DataError, match="use words, characters, lines"):
        length("s", "a", None, most=1, unit="tokens")
    with pytest.raises(DataError, match="use 0 <= least <= most"):
        length("s", "a", None, least=3, most=2)
