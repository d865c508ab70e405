"""The built-in reward functions, by name. All have verl's signature and return a score, `acc` and the answer they read.

The scorer runs the ones in `INLINE` where the trajectory is made: they are quick for any input. The others may be slow
or hang on a hostile answer, so they run in a process that can be killed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from tqppo.errors import DataError, PreflightError
from tqppo.rewards import code as programs

Scored = dict[str, float | str]
Extra = Mapping[str, object] | None
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
JSON_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
MARKED_NUMBER = re.compile(r"####\s*\$?(-?\d[\d,]*\.?\d*)")


def exact_match(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None, *, ignore_case: bool = False
) -> Scored:
    """1 when the answer is the reference, apart from white space around it."""
    found, wanted = solution_str.strip(), str(ground_truth).strip()
    right = found.lower() == wanted.lower() if ignore_case else found == wanted
    return _scored(right, found)


def partial_match(data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None) -> Scored:
    """The share of positions with the right character; surplus characters count as wrong ones."""
    found, wanted = solution_str.strip(), str(ground_truth).strip()
    same = sum(a == b for a, b in zip(found, wanted))  # noqa: B905 - the longer tail counts below
    share = same / max(len(found), len(wanted), 1)
    return {**_scored(found == wanted, found), "score": share}


def contains(data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None) -> Scored:
    """1 when the reference occurs anywhere in the answer."""
    return _scored(str(ground_truth).strip() in solution_str, solution_str.strip())


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Extra = None,
    *,
    method: str = "flexible",
    format_score: float = 0.0,
) -> Scored:
    """Compares numbers. strict: the number after `####`; flexible: the last number of the answer.

    An answer with such a number, but the wrong one, gets `format_score`.
    """
    if method not in ("strict", "flexible"):
        raise DataError(f'reward gsm8k: method = {method!r}; use "strict" or "flexible"')
    marked = MARKED_NUMBER.findall(solution_str)
    numbers = marked if method == "strict" else marked or NUMBER.findall(solution_str)
    wanted = (MARKED_NUMBER.findall(str(ground_truth)) or NUMBER.findall(str(ground_truth)) or [""])[-1]
    if not numbers:
        return _scored(False, "")
    found = _number(numbers[-1])
    right = found is not None and found == _number(wanted)
    return {**_scored(right, str(found)), "score": 1.0 if right else format_score}


def matches(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None, *, pattern: str
) -> Scored:
    """1 when the answer matches the regular expression `pattern` somewhere; a dot matches line ends too."""
    return _scored(_compiled(pattern).search(solution_str) is not None, solution_str.strip())


def math(data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None) -> Scored:
    """1 when the answer equals the reference mathematically, by math-verify (extra `math`)."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise PreflightError("reward math needs math-verify: pip install 'tqppo[math]'") from None
    # math-verify's own timeouts use signals, and it warns without them; the process is killed after reward.timeout_s.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    wanted = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    found = parse(solution_str, parsing_timeout=None)
    right = bool(wanted) and bool(found) and verify(wanted, found, timeout_seconds=None)
    return _scored(bool(right), str(found[0]) if found else "")


def gym(data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None) -> Scored:
    """The score that the row's reasoning-gym dataset gives to the answer (extra `gym`)."""
    try:
        import reasoning_gym
    except ImportError:
        raise PreflightError("reward gym needs reasoning-gym: pip install 'tqppo[gym]'") from None
    if not extra_info or "entry" not in extra_info:
        raise DataError("reward gym scores rows of gym:NAME only; this row comes from another source")
    answer = solution_str.strip()
    score = float(reasoning_gym.get_score_answer_fn(extra_info["gym"])(answer, extra_info["entry"]))
    return {**_scored(score >= 1.0, answer), "score": score}


def length(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Extra = None,
    *,
    least: int = 0,
    most: int,
    unit: str = "words",
) -> Scored:
    """1 when the answer has `least` to `most` words (or characters, or lines); less, the further away it is."""
    lines = solution_str.count("\n") + 1
    counts = {"words": len(solution_str.split()), "characters": len(solution_str), "lines": lines}
    if unit not in counts:
        raise DataError(f"reward length: unit = {unit!r}; use {', '.join(counts)}")
    if not 0 <= least <= most or not most:
        raise DataError(f"reward length: least = {least} and most = {most}; use 0 <= least <= most, and most >= 1")
    count = counts[unit]
    share = count / least if count < least else most / count if count > most else 1.0
    return {"score": share, "acc": float(share == 1.0), "pred": str(count)}


def json_schema(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Extra = None,
    *,
    schema: Mapping[str, object] | None = None,
) -> Scored:
    """1 when the answer is JSON that fits `schema`, or the reference answer as a schema (extra `json`).

    JSON may stand in a fenced block. Without any schema, every valid JSON fits.
    """
    try:
        import jsonschema
    except ImportError:
        raise PreflightError("reward json_schema needs jsonschema: pip install 'tqppo[json]'") from None
    wanted = schema if schema is not None else ground_truth if isinstance(ground_truth, Mapping) else {}
    fenced = JSON_FENCE.findall(solution_str)
    text = str(fenced[-1] if fenced else solution_str).strip()
    try:
        jsonschema.validate(json.loads(text), dict(wanted))
    except jsonschema.SchemaError as error:
        raise DataError(f"reward json_schema: the schema is not valid: {error.message}") from None
    except (ValueError, jsonschema.ValidationError):
        return _scored(False, text)
    return _scored(True, text)


def code(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Extra = None,
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
) -> Scored:
    """1 when the answer's program passes all tests of the reference; with `partial`, the share that it passes.

    Each test runs in a process with limits. `tqppo.rewards.code` says which forms tests may have.
    """
    program = programs.program_in(solution_str)
    tests = programs.read_tests(ground_truth)
    passed = 0
    for test in tests:
        right = programs.passes(program, test, timeout_s=timeout_s, memory_mb=memory_mb)
        passed += right
        if not right and not partial:
            break
    share = passed / len(tests)
    return {**_scored(passed == len(tests), program), "score": share if partial else float(passed == len(tests))}


def task(data_source: str, solution_str: str, ground_truth: object, extra_info: Extra = None) -> Scored:
    """Scores with the function that the row's task or gym dataset names; rows of files use `exact_match`."""
    return BUILT_IN[own_reward(extra_info)](data_source, solution_str, ground_truth, extra_info)


BUILT_IN: dict[str, Callable[..., Scored]] = {
    "task": task,
    "exact_match": exact_match,
    "partial_match": partial_match,
    "contains": contains,
    "gsm8k": gsm8k,
    "matches": matches,
    "math": math,
    "gym": gym,
    "length": length,
    "json_schema": json_schema,
    "code": code,
}
INLINE = frozenset({"exact_match", "partial_match", "contains", "gsm8k", "length"})
REFERENCE_IS_NO_ANSWER = frozenset({"code", "json_schema"})  # it has the tests or the schema that answers are held to


def own_reward(extra_info: Extra) -> str:
    """The built-in function for a row when the config names none."""
    name = (extra_info or {}).get("reward", "exact_match")
    return str(name) if name in ("partial_match", "gym") else "exact_match"


def _scored(right: bool, prediction: str) -> Scored:
    return {"score": float(right), "acc": float(right), "pred": prediction}


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


@lru_cache(maxsize=8)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise DataError(f"reward matches: pattern {pattern!r} is not a regular expression: {error}") from None
