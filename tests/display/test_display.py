"""What the user sees: plain lines, a live panel in a real terminal, and a clean end."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import time
from typing import Any

import pexpect
import pytest
from rich.console import Console

from tqppo.display import charts
from tqppo.display.display import Display, Ending
from tqppo.display.panel import panel

ENDING = Ending("trained 10 steps in 0:03", {"model": "runs/x/export/hf"}, [("tqppo report x", "every curve")])


def _metrics(step: int) -> dict[str, float]:
    return {
        "critic/score/mean": step / 10,
        "response_length/mean": 4.5,
        "actor/ppo_kl": 0.0012,
        "actor/entropy": 1.0 / step,
        "perf/throughput": 5210.0,
        "timing_s/step": 0.5,
        "timing_s/gen": 0.3,
        "timing_s/update_actor": 0.2,
    }


def _validation(sampled: float, greedy: float) -> dict[str, float]:
    return {"val-core/sort/acc/mean@1": sampled, "val-core/sort/acc/greedy": greedy}


def _console(width: int = 100, **settings: Any) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False, **settings)


def _run(display: Display) -> str:
    display.step(0, _validation(0.02, 0.4))
    for step in range(1, 11):
        display.step(step, _metrics(step) | (_validation(0.9, 0.95) if step == 10 else {}))
    display.finish(ENDING)
    file = display.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_without_a_terminal_there_are_plain_lines() -> None:
    text = _run(Display("x", max_steps=10, console=_console()))
    assert "\x1b" not in text
    line = next(each for each in text.splitlines() if each.startswith("step 5/10"))
    for part in ("reward 0.500 ▁▃▄▆█", "length 4.500", "KL 1.2e-03", "entropy 0.200", "tok/s 5210", "eta 0:02"):
        assert part in line


def test_the_end_shows_before_and_after_and_what_to_do_next() -> None:
    text = _run(Display("x", max_steps=10, console=_console()))
    end = text[text.index("trained 10 steps") :]
    assert "sort acc, sampled" in end
    assert "0.020   →   0.900   +0.880" in end
    assert "0.400   →   0.950   +0.550" in end
    assert "runs/x/export/hf" in end
    assert "tqppo report x" in end


class FullFile(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_output_to_a_file_on_a_full_disk_does_not_end_the_run() -> None:
    display = Display("x", max_steps=10, console=Console(file=FullFile(), width=100))
    display.note("a checkpoint was not written")
    display.step(1, _metrics(1))
    display.finish(ENDING)


def test_long_runs_of_quick_steps_get_about_thirty_lines() -> None:
    display = Display("x", max_steps=1000, console=_console())
    for step in range(1, 1001):
        display.step(step, _metrics(step))
    lines = display.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 25 <= len(lines) <= 40
    assert lines[0].startswith("step 1/")
    assert lines[-1].startswith("step 1000/")


def test_quiet_says_nothing_but_warnings() -> None:
    display = Display("x", max_steps=10, quiet=True, console=_console())
    with display.stage("starting Ray"):
        pass
    display.warn("one replica was restarted")
    assert _run(display) == "warning: one replica was restarted\n"


def test_a_terminal_without_unicode_gets_ascii() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=100, force_terminal=False)
    display = Display("x", max_steps=10, console=console)
    for step in range(1, 11):
        display.step(step, _metrics(step))
    display.finish(ENDING)
    console.file.flush()


def test_a_resumed_run_remembers_its_first_validation_and_its_curve() -> None:
    display = Display("x", max_steps=10, console=_console())
    display.recall([{"step": 0, **_validation(0.02, 0.4)}, {"step": 1, **_metrics(1), "actor/loss": None}])
    display.step(2, _metrics(2) | _validation(0.5, 0.6))
    assert display.progress.reward == [0.1, 0.2]
    assert [(each.first, each.last) for each in display.progress.validations()] == [(0.02, 0.5), (0.4, 0.6)]


@pytest.mark.parametrize("width", [40, 64, 80, 100, 200])
def test_the_panel_fits_any_terminal(width: int) -> None:
    display = Display("x", subtitle="grpo · tiny", max_steps=10, console=_console(width))
    display.step(0, _validation(0.02, 0.4))
    display.step(1, _metrics(1))
    display.step(2, _metrics(2))
    console = _console(width)
    console.print(panel(display.progress, width=width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(each) <= width for each in lines)
    assert any("reward" in each for each in lines)


def test_the_panel_uses_the_width_of_the_terminal() -> None:
    display = Display("x", max_steps=2, console=_console())
    for step in (1, 2):
        display.step(step, _metrics(step))
    heights = {}
    for width in (80, 130, 200):
        console = _console(width)
        console.print(panel(display.progress, width=width))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert {len(each) for each in lines} == {width}
        heights[width] = len(lines)
    assert heights[80] == heights[130] < heights[200]


LIVE = """
import signal, sys, time
from rich.console import Console
from tqppo.display.display import Display, Ending
with Display("quick", max_steps=50) as display:
    with display.stage("starting Ray"):
        time.sleep(0.8)
    display.note("a note")
    print("READY", flush=True)
    for step in range(1, 51):
        display.step(step, {"critic/score/mean": step / 50, "timing_s/gen": 0.1})
        time.sleep(0.05 if sys.argv[1] == "end" else 0.3)
    display.finish(Ending("trained", {"model": "runs/quick"}))
"""
CLEAR, ESCAPES = "\x1b[2J", re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def live(pace: str) -> pexpect.spawn:
    """A program that shows a run, in a terminal of 100 × 40."""
    return pexpect.spawn(
        sys.executable,
        ["-c", LIVE, pace],
        encoding="utf-8",
        dimensions=(40, 100),
        timeout=30,
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},  # the pty's count
        # A test run in the background has inherited "ignore", which Python would keep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_terminal_shows_stages_then_a_panel_then_the_end() -> None:
    child = live("end")
    child.expect("starting Ray …")
    child.expect("✓")
    child.expect("step ")
    child.expect("trained")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_terminal_of_another_size_is_cleared_and_drawn_anew() -> None:
    child = live("slow")
    child.expect("READY")
    child.expect("╮")
    child.setwinsize(30, 70)
    child.expect_exact(CLEAR)
    child.expect("a note")
    child.expect("─╮")
    top = str(child.before).rpartition("╭")[2]
    assert len(ESCAPES.sub("", top)) == 70 - 3
    child.close(force=True)


def test_ctrl_c_gives_the_cursor_back() -> None:
    child = live("slow")
    child.expect("READY")
    time.sleep(0.5)
    child.sendintr()
    child.expect(pexpect.EOF)
    text = child.before or ""
    child.close()
    assert "KeyboardInterrupt" in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_a_failed_stage_says_so_and_lets_the_error_pass() -> None:
    display = Display("x", console=_console())
    with pytest.raises(ValueError, match="boom"), display.stage("loading the model"):
        raise ValueError("boom")
    assert "✗ loading the model" in display.console.file.getvalue()  # type: ignore[attr-defined]


def test_numbers_are_short() -> None:
    shown = [charts.number(value) for value in (0, 0.5, 0.00123, 12.34, 5210, 12345, 3.2e6, float("nan"))]
    assert shown == ["0.000", "0.500", "1.2e-03", "12.3", "5210", "12.3k", "3.2M", "nan"]
    assert [charts.duration(value) for value in (7, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


def test_sparkline_covers_its_own_range() -> None:
    assert charts.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert charts.sparkline([2.0, 2.0]) == "▁▁"
    assert charts.sparkline([]) == ""
    assert len(charts.sparkline(list(range(100)), 12)) == 12


def test_shares_add_up_and_small_ones_are_joined() -> None:
    parts = charts.shares({"gen": 6.0, "update": 3.0, "adv": 0.1, "reward": 0.1, "pad": 0.8})
    assert [name for name, _ in parts] == ["gen", "update", "pad", "other"]
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    assert sum(charts.widths([share for _, share in parts], 77)) == 77


def test_the_progress_of_a_stage_is_shown_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    console = _console()
    display = Display("x", console=console)
    with display.stage("making teachers") as show:
        show("step 10")
        monkeypatch.setattr("tqppo.display.display.PROGRESS_EVERY_S", 0.0)
        show("step 20")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 10" not in text
    assert "making teachers: step 20" in text


def test_the_progress_of_a_stage_is_part_of_its_line_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    display = Display("x", console=console)
    with display, display.stage("making teachers") as show:
        show("step 10")
        deadline = time.monotonic() + 10
        while "making teachers: step 10" not in console.file.getvalue():  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_one_validation_is_not_shown_as_a_change() -> None:
    console = Console(file=io.StringIO(), width=100)
    display = Display("mine", max_steps=4, console=console)
    display.step(0, {"val-core/sort/acc/mean@1": 0.016})
    display.step(1, {"critic/score/mean": 0.1})
    display.finish(Ending("stopped after 1 of 4 steps", {}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "before training" in text
    assert "→" not in text
    assert "after " not in text.replace("after 1 of", "")


def test_a_first_validation_after_training_began_is_named_by_its_step() -> None:
    console = Console(file=io.StringIO(), width=100)
    display = Display("mine", max_steps=4, console=console)
    for step, score in ((2, 0.1), (4, 0.5)):
        display.step(step, {"val-core/sort/acc/mean@1": score})
    display.finish(Ending("finished", {}))
    heading = next(line for line in console.file.getvalue().splitlines() if "held-out" in line)  # type: ignore[attr-defined]
    assert heading.split() == ["held-out", "step", "2", "step", "4", "change"]


def test_an_example_with_its_reward_is_part_of_the_panel_and_of_the_summary() -> None:
    console = Console(file=io.StringIO(), width=100)
    display = Display("mine", max_steps=4, console=console)
    display.progress.example = "'3142' → '1234', reward 1"
    display.step(1, _metrics(1))
    display.finish(ENDING)
    assert "'3142' → '1234', reward 1" in console.file.getvalue()  # type: ignore[attr-defined]
    drawn = Console(file=io.StringIO(), width=100)
    drawn.print(panel(display.progress, width=100))
    assert "'3142' → '1234', reward 1" in drawn.file.getvalue()  # type: ignore[attr-defined]
