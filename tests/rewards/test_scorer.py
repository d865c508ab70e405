"""Rewards: built-ins by hand, user functions in processes, deadlines that hold, nothing left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tqppo.errors import DataError
from tqppo.rewards.functions import BUILT_IN
from tqppo.rewards.scorer import Reward, RewardError, Scorer, ScorerSpec, overlong_penalty

USER_FILE = """
import asyncio, os, re, subprocess, time

def length(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    print("printing is allowed")
    words = len(solution_str.split())
    return {"score": len(solution_str) * scale, "words": words, "note": "text", "pred": ground_truth}

def moody(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if solution_str == "die":
        os.abort()
    if solution_str == "children":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if solution_str == "raise":
        raise ValueError("no such answer")
    if solution_str == "nan":
        return float("nan")
    if solution_str.startswith("return "):
        return eval(solution_str.removeprefix("return "))
    if solution_str == "nothing":
        return {"points": 1}
    return 1.0

running = 0

async def crowd(data_source, solution_str, ground_truth, extra_info=None):
    global running
    running += 1
    await asyncio.sleep(0.3)
    together, running = running, running - 1
    return {"score": float(solution_str), "together": together}

async def slow(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "block":
        time.sleep(600)
    await asyncio.sleep(600 if solution_str == "late" else 0.2)
    return float(solution_str) if solution_str.isdigit() else 0.5

def wrong_signature(prompt, completion):
    return 0.0
"""


def load(function: str = "", **settings: Any) -> Scorer:
    return Scorer(ScorerSpec(function=function, **settings))


def processes() -> set[int]:
    """The supervisors of this process's reward processes: one for each of them."""
    children = psutil.Process().children()
    return {child.pid for child in children if "tqppo.rewards.process" in child.cmdline()}


def score_all(scorer: Scorer, *solutions: str) -> list[Reward]:
    async def together() -> list[Reward]:
        return await asyncio.gather(*(scorer.score("test", each, "") for each in solutions))

    return asyncio.run(together())


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture
def make(user_file: Path) -> Iterator[Any]:
    """Scorers of the user's file; closed at the end, when none of their processes may be left."""
    made: list[Scorer] = []

    def scorer(function: str, **settings: Any) -> Scorer:
        made.append(load(f"{user_file}:{function}", **settings))
        return made[-1]

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield scorer
    for each in made:
        each.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def score(scorer: Scorer, solution: str, answer: Any = "", extra: Any = None, **more: Any) -> Reward:
    return asyncio.run(scorer.score("test", solution, answer, extra, **more))


def test_exact_match_ignores_white_space_around_the_answer_only() -> None:
    scorer = load("exact_match")
    assert score(scorer, " 1234\n", "1234") == Reward(1.0, {"acc": 1.0}, "1234")
    assert score(scorer, "12 34", "1234").score == 0.0
    assert score(scorer, "42", 42).score == 1.0
    assert score(load("exact_match", function_args={"ignore_case": True}), "Paris", "paris").score == 1.0


def test_partial_match_is_the_share_of_right_characters() -> None:
    scorer = load("partial_match")
    assert score(scorer, "1243", "1234") == Reward(0.5, {"acc": 0.0}, "1243")
    assert score(scorer, "12345678", "1234").score == 0.5
    assert score(scorer, "", "1234").score == 0.0


@pytest.mark.parametrize(
    ("answer", "truth", "arguments", "expected"),
    [
        ("so it is 1,234.", "1234", {}, 1.0),
        ("3 + 4 = 7", "natalia ... #### 7", {}, 1.0),
        ("#### 18 and then 20", "18", {}, 1.0),
        ("the answer is 18", "18", {"method": "strict"}, 0.0),
        ("#### $18", "18.0", {"method": "strict"}, 1.0),
        ("17", "18", {"format_score": 0.1}, 0.1),
        ("none", "18", {"format_score": 0.1}, 0.0),
    ],
)
def test_gsm8k_compares_numbers(answer: str, truth: str, arguments: dict[str, Any], expected: float) -> None:
    assert score(load("gsm8k", function_args=arguments), answer, truth).score == expected


def test_contains_finds_the_reference_anywhere() -> None:
    assert score(load("contains"), "it is Paris.", "Paris").score == 1.0
    assert score(load("contains"), "it is Rome.", "Paris").score == 0.0


def test_a_row_chooses_its_own_reward_when_the_config_names_none() -> None:
    before = processes()
    scorer = load("")
    assert score(scorer, "1243", "1234", {"reward": "partial_match"}).score == 0.5
    assert score(scorer, "1243", "1234", {"reward": "exact_match"}).score == 0.0
    assert score(scorer, "1234", "1234").score == 1.0
    assert processes() == before


def test_built_ins_that_may_hang_run_in_a_process() -> None:
    before = processes()
    scorer = load("matches", function_args={"pattern": r"^(a+)+$"}, timeout_s=0.5, on_error="zero")
    try:
        assert score(scorer, "aaa").score == 1.0
        assert "longer than 0.5 s" in score(scorer, "a" * 40 + "b").failure
        assert score(scorer, "aab").score == 0.0
        assert len(processes() - before) == 1
    finally:
        scorer.close()


@pytest.mark.slow
def test_math_and_gym_judge_by_their_libraries() -> None:
    from tqppo.data import dataset

    math = load("math")
    row = dataset.load("gym:basic_arithmetic", size=10).row(0)
    own = load("")
    try:
        assert score(math, r"so $\boxed{\frac{2}{4}}$", "1/2").score == 1.0
        assert score(math, r"so $\boxed{3}$", "1/2").score == 0.0
        assert score(own, row.answer, row.answer, row.extra).score == 1.0
        assert score(own, "no idea", row.answer, row.extra).score < 1.0
    finally:
        math.close()
        own.close()


def test_user_function_gets_its_arguments_and_its_numbers_become_metrics(make: Any) -> None:
    scorer = make("length", function_args={"scale": 0.5})
    assert score(scorer, "four words of text", "truth") == Reward(9.0, {"words": 4.0}, "truth")


def test_module_path_works_like_a_file(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_file.parent)
    scorer = load("my_rewards:length")
    try:
        assert score(scorer, "abc").score == 3.0
    finally:
        scorer.close()


@pytest.mark.parametrize("solution", ["loop", "regex", "children"])
def test_a_late_sample_is_cut_off_and_the_next_one_scored(make: Any, solution: str) -> None:
    scorer = make("moody", timeout_s=0.5, on_error="zero")
    late = score(scorer, solution)
    assert late.score == 0.0
    assert "took longer than 0.5 s" in late.failure
    assert score(scorer, "fine") == Reward(1.0)


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("die", "SIGABRT"),
        ("raise", r"ValueError: no such answer \(.*my_rewards.py:\d+\)"),
        ("nan", "not a finite number"),
        ("nothing", "has no 'score'; it has points"),
        ("return 1e308", r"its score is 1e\+308; rewards beyond .* The sample was 'return 1e308'"),
        ("return 10**400", "its score is an integer of 1329 bits"),
        ("return -float('inf')", "its score is -inf, which is not a finite number"),
        ("return {'score': 1, 'part': 10**400}", "its metric 'part' is inf"),
        ("return {'score': 1, 'part': float('nan')}", "its metric 'part' is nan"),
    ],
)
def test_a_failure_under_the_policy_error_says_what_happened(make: Any, solution: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        score(make("moody", timeout_s=5.0), solution)


def test_a_weight_that_makes_a_score_absurd_is_found_with_the_sample(make: Any) -> None:
    with pytest.raises(RewardError, match=r"with its weights, its score is 3e\+09.*The sample was 'xxx'"):
        score(make("length", weights=[1e9]), "xxx")


def test_the_policy_decides_what_a_failure_costs(make: Any) -> None:
    assert score(make("moody", on_error="zero"), "raise").drop_group is False
    dropped = score(make("moody", on_error="drop_group"), "raise")
    assert dropped.drop_group
    assert dropped.score == 0.0
    assert "no such answer" in dropped.failure


def test_batch_keeps_its_order_over_several_processes(make: Any) -> None:
    before = processes()
    scorer = make("length", workers=3)
    solutions = ["x" * (i % 7) for i in range(60)]
    assert [each.score for each in score_all(scorer, *solutions)] == [float(i % 7) for i in range(60)]
    assert len(processes() - before) == 3


def test_async_function_works_on_many_samples_at_once(make: Any) -> None:
    found = score_all(make("crowd"), *map(str, range(32)))
    assert [each.score for each in found] == [float(i) for i in range(32)]
    assert max(each.metrics["together"] for each in found) > 4


def test_a_late_async_sample_fails_alone(make: Any) -> None:
    scorer = make("slow", timeout_s=1.0, on_error="zero")
    found = score_all(scorer, "1", "late", "2")
    assert [each.score for each in found] == [1.0, 0.0, 2.0]
    assert "longer than 1 s" in found[1].failure


@pytest.mark.slow
def test_an_async_sample_that_blocks_its_process_does_not_take_the_others_along(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqppo.processes.pool.GRACE_S", 0.2)
    scorer = make("slow", timeout_s=0.8, on_error="zero")
    found = score_all(scorer, "1", "block", "2")
    assert [each.score for each in found] == [1.0, 0.0, 2.0]


def test_what_cannot_be_called_is_refused_before_training(make: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"f\(data_source, solution_str"):
        make("wrong_signature")
    with pytest.raises(DataError, match="has no function 'missing'"):
        make("missing")
    with pytest.raises(DataError, match="there is no file"):
        load(str(tmp_path / "nowhere.py") + ":f")
    with pytest.raises(DataError, match="cannot import no_such_module"):
        load("no_such_module:f")
    with pytest.raises(DataError, match="no built-in has this name"):
        load("exact")
    with pytest.raises(DataError, match="pattern"):
        load("matches")
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')")
    with pytest.raises(DataError, match="at import"):
        load(f"{tmp_path / 'broken.py'}:f")


def test_close_while_scoring_ends_the_wait(make: Any) -> None:
    scorer = make("moody", on_error="zero", timeout_s=60.0)

    async def close_soon() -> Reward:
        waiting = asyncio.ensure_future(scorer.score("test", "loop", ""))
        await asyncio.sleep(0.3)
        await asyncio.get_running_loop().run_in_executor(None, scorer.close)
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(close_soon()).failure


def test_a_scoring_process_dies_with_its_owner(user_file: Path) -> None:
    """Even when the owner is killed and the function is stuck in C code."""
    code = (
        "import asyncio, psutil; from tqppo.rewards.scorer import Scorer, ScorerSpec\n"
        f"scorer = Scorer(ScorerSpec({str(user_file) + ':moody'!r}))\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "asyncio.run(scorer.score('test', 'regex', ''))\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    worker = psutil.Process(int(owner.stdout.readline()))
    time.sleep(0.3)
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs([worker], timeout=10)[1] == []


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (120, -0.5)])
def test_overlong_penalty_falls_in_a_line_to_the_limit(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_new_tokens=100, buffer=20, factor=0.5) == pytest.approx(penalty)


def test_overlong_answers_lose_score_and_show_it() -> None:
    scorer = load("exact_match", overlong_buffer=20, max_new_tokens=100)
    assert score(scorer, "1", "1", response_tokens=90).score == pytest.approx(0.5)
    assert score(scorer, "1", "1", response_tokens=90).metrics["overlong_penalty"] == pytest.approx(-0.5)
    assert score(scorer, "1", "1", response_tokens=10).score == 1.0


def test_every_built_in_has_a_docstring_for_the_manual() -> None:
    assert all(function.__doc__ for function in BUILT_IN.values())
