"""The calculator and the Python interpreter that come with tqppo."""

from __future__ import annotations

import pytest

from tqppo.rollout.tools.library import calculate, python
from tqppo.rollout.tools.schema import function_schema


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 * (17 + 4) / 7", "9"), ("2**10 - -1", "1025"), ("7 // 2 + 7 % 4", "6"), ("1/4", "0.25")],
)
def test_calculator_works_expressions_out(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_functions_and_constants_are_known() -> None:
    assert calculate("comb(5, 2) + gcd(12, 18)") == "16"
    assert calculate("floor(pi) + max(1, 2)") == "5"


@pytest.mark.parametrize("expression", ["__import__('os')", "x", "'a' * 9", "True", "(1).real", "[1]", "1 > 0"])
def test_calculator_runs_no_code(expression: str) -> None:
    with pytest.raises(ValueError, match="is not arithmetic"):
        calculate(expression)


def test_program_shows_what_it_prints_and_its_last_value() -> None:
    assert python("x = 20\nprint('hi')\nx + 1") == "hi\n21"
    assert python("def f(n):\n    return n * 2\nprint(f(4))") == "8\n"
    assert python("") == ""


def test_failing_program_says_where_and_what_it_had_printed() -> None:
    assert python("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero (line 2)"
    assert python("def (").startswith("SyntaxError: ")


def test_both_can_be_described_to_a_model() -> None:
    for tool, parameter in ((calculate, "expression"), (python, "code")):
        schema = function_schema(tool, tool.__name__)["function"]
        assert schema["parameters"]["required"] == [parameter]  # type: ignore[index]
        assert schema["parameters"]["properties"][parameter]["description"]  # type: ignore[index]
