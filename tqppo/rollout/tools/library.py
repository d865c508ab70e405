"""Tools that come with tqppo: a calculator and a Python interpreter, for `rollout.agent_args.tools`.

Calls run in processes with a deadline and a limit on memory, and with all other rights of the run: where the model is
not trusted with those, run the rollout in a container.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import operator
import traceback
from collections.abc import Callable

BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    **{
        name: getattr(math, name) for name in ("sqrt", "floor", "ceil", "gcd", "lcm", "factorial", "comb", "log", "exp")
    },
}
PROGRAM = "<program>"  # the name of the model's code in tracebacks
CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression, such as `3 * (17 + 4) / 7`.

    Args:
        expression: numbers with + - * / // % **, parentheses, and functions such as sqrt, floor, gcd and comb
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def python(code: str) -> str:
    """Run Python code and return what it prints, and the value of its last line.

    Args:
        code: a program; it sees no variables of earlier calls
    """
    printed = io.StringIO()
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        try:
            value = _run(ast.parse(code), names)
        except SyntaxError as error:
            return f"SyntaxError: {error}"
        except Exception as error:  # noqa: BLE001 - the model's program can raise anything, and the model gets to see it
            where = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == PROGRAM]
            line = f" (line {where[-1]})" if where else ""
            return f"{printed.getvalue()}{type(error).__name__}: {error}{line}"
    return printed.getvalue() + ("" if value is None else repr(value))


def _run(program: ast.Module, names: dict[str, object]) -> object:
    """Run a program; returns the value of its last line if that is an expression."""
    last = program.body[-1] if program.body else None
    if isinstance(last, ast.Expr):
        program.body.pop()
    exec(compile(program, PROGRAM, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), PROGRAM, "eval"), names)
    return None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in BINARY:
            return BINARY[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=prefix, operand=operand) if type(prefix) in UNARY:
            return UNARY[type(prefix)](_value(operand))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
