"""Runs a program that a model wrote against tests, in a process with limits on time, memory and files.

The limits keep a faulty program from harming the run. They are no protection against a hostile one: for that, run in
a container.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tqppo.errors import DataError
from tqppo.processes import lifeline

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """Python statements that raise if the program is wrong, or an input and the output that it should print."""

    statements: str = ""
    stdin: str = ""
    stdout: str | None = None


def program_in(answer: str) -> str:
    """The last fenced block of an answer, or the whole answer if it has none."""
    blocks = FENCE.findall(answer)
    return str(blocks[-1]) if blocks else answer


def read_tests(truth: object) -> list[ProgramTest]:
    """Tests as datasets have them: asserts (text or a list of texts), or inputs with the outputs to print."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except ValueError:
            return [_statements(str(truth))]
    if isinstance(truth, str) and truth.strip():
        return [_statements(truth)]
    if isinstance(truth, Mapping) and {"inputs", "outputs"} <= set(truth):
        pairs = zip(truth["inputs"], truth["outputs"], strict=True)
        return [ProgramTest(stdin=_text(given), stdout=_text(wanted)) for given, wanted in pairs]
    if isinstance(truth, Sequence) and truth and not isinstance(truth, str):
        return [_test(each) for each in truth]
    raise DataError(
        "reward code needs tests as the answer: Python asserts, a list of them, or {inputs = […], outputs = […]}; "
        f"found {truth!r:.80}"
    )


def _statements(text: str) -> ProgramTest:
    """A test of Python text. DataError if nothing in it can fail: every program would pass."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return ProgramTest(text)  # which no program passes
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in nodes):
        raise DataError(f"reward code: nothing in the test can fail; write asserts, not {text!r:.80}")
    return ProgramTest(text)


def _test(each: object) -> ProgramTest:
    if isinstance(each, str):
        return _statements(each)
    if isinstance(each, Mapping) and "output" in each:
        return ProgramTest(stdin=_text(each.get("input", "")), stdout=_text(each["output"]))
    raise DataError(f'reward code: a test is Python text or {{"input": …, "output": …}}, not {each!r:.80}')


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def passes(program: str, test: ProgramTest, *, timeout_s: float, memory_mb: int) -> bool:
    """Run the program with one test. Too slow, too large, an exception or a wrong output: false."""
    source = f"{program}\n\n{test.statements}\n"
    with tempfile.TemporaryDirectory(prefix="tqppo-code-") as folder, tempfile.TemporaryFile() as printed:
        others = set(lifeline.descendants(os.getpid()))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", source],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=partial(_limit, timeout_s, memory_mb),
        )
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(test.stdin.encode(), timeout=timeout_s)
        _end_program(process, others)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    if process.returncode != 0:
        return False
    return test.stdout is None or _lines(output) == _lines(test.stdout)


def _limit(timeout_s: float, memory_mb: int) -> None:
    seconds = max(1, round(timeout_s + 1))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_program(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """End the program and what it started, in whatever session: in a reward's process, orphans become its children."""
    left = set(lifeline.descendants(os.getpid())) - others
    lifeline.end(left)
    process.wait(lifeline.KILL_TIMEOUT_S)
    for pid in left - {process.pid}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
