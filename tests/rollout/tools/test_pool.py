"""Tools in processes: good ones answer, bad ones are ended, and nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tqppo.errors import DataError
from tqppo.processes import lifeline
from tqppo.rollout.tools.calls import ToolCall
from tqppo.rollout.tools.pool import ToolPool, ToolResult, ToolSpec
from tqppo.rollout.tools.process import as_text, shorten

TOOLS = '''
import asyncio, os, signal, sys, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

async def later(text: str) -> str:
    await asyncio.sleep(0.01)
    return text

def crash(how: str) -> str:
    if how == "exit":
        os._exit(7)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "raise":
        raise ValueError("no such city")
    sys.exit("done")

def hang(seconds: float) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "woke up"

def chatter(megabytes: int) -> str:
    block = b"x" * 2**20
    for _ in range(megabytes):
        os.write(1, block)
        os.write(2, block)
    print("also through Python")
    return "said"

def long(megabytes: int) -> str:
    return "a" + "x" * (megabytes * 2**20) + "z"

def raw(kind: str) -> object:
    results = {"bytes": bytes(range(256)), "surrogate": "ok \\ud800 \\x00", "none": None}
    return {**results, "table": {"a": [1, 2]}, "set": {1}}[kind]

class Hostile:
    def __str__(self):
        raise RuntimeError("not me")
    __repr__ = __str__

def hostile(kind: str) -> object:
    if kind == "raise":
        raise RuntimeError(Hostile())
    return Hostile()

def daemon(file: str, seconds: float = 0.0) -> str:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(file, "w") as out:
                out.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(file) or not open(file).read():
        time.sleep(0.01)
    time.sleep(seconds)
    return "started"

def forger() -> str:
    """Writes into every descriptor that it finds."""
    for name in os.listdir("/proc/self/fd"):
        try:
            os.write(int(name), b'{"id": 0, "value": "forged"}\\n')
        except OSError:
            pass
    return "honest"

def hungry(gigabytes: int) -> str:
    return str(len(bytearray(gigabytes * 2**30)))
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools_of_test.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[ToolPool]:
    names = ("add", "later", "crash", "hang", "chatter", "long", "raw", "hostile", "daemon", "forger", "hungry")
    made = ToolPool(
        ToolSpec([f"{file}:{name}" for name in names], workers=1, timeout_s=30.0, max_chars=40, memory_gb=4)
    )
    yield made
    made.close()


def call(pool: ToolPool, name: str, **arguments: object) -> ToolResult:
    return asyncio.run(pool.call(ToolCall(name, arguments)))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_plain_and_async_functions_answer(pool: ToolPool) -> None:
    assert call(pool, "add", a=2).text == "3"
    assert call(pool, "later", text="hello").text == "hello"
    assert not call(pool, "add", a=2, b=5).is_error
    assert pool.tools["add"].schema["function"]["description"] == "Add two numbers."  # type: ignore[index]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "the tool's process ended (exit code 7)"),
        ("signal", "the tool's process ended (signal SIGSEGV)"),
        ("raise", "ValueError: no such city"),
        ("leave", "SystemExit: done"),
    ],
)
def test_a_tool_that_crashes_is_an_error_and_the_next_call_works(pool: ToolPool, how: str, message: str) -> None:
    result = call(pool, "crash", how=how)
    assert result.is_error
    assert message in result.text
    assert call(pool, "add", a=1).text == "2"


def test_a_tool_that_hangs_is_ended_at_its_deadline(file: Path) -> None:
    pool = ToolPool(ToolSpec([f"{file}:hang", f"{file}:add"], workers=1, timeout_s=1.0))
    begin = time.monotonic()
    result = call(pool, "hang", seconds=600.0)
    assert result == ToolResult("took longer than 1 s", is_error=True, seconds=result.seconds)
    assert 1 <= time.monotonic() - begin < 10
    assert call(pool, "add", a=1).text == "2"
    pool.close()


def test_gigabytes_of_prints_go_nowhere(pool: ToolPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(pool, "chatter", megabytes=1024).text == "said"
    assert len(capfd.readouterr().err) < 1000


def test_a_long_result_loses_its_middle(pool: ToolPool) -> None:
    text = call(pool, "long", megabytes=64).text
    assert text.startswith("axxx")
    assert text.endswith("xxxz")
    assert "67108826 characters left out" in text
    assert len(text) < 100


def test_bytes_and_broken_text_become_text_that_can_be_encoded(pool: ToolPool) -> None:
    assert call(pool, "raw", kind="bytes").text.encode("utf-8").startswith(b"\x00\x01\x02")
    assert call(pool, "raw", kind="surrogate").text == "ok ? \x00"
    assert call(pool, "raw", kind="none").text == "null"
    assert call(pool, "raw", kind="table").text == '{"a": [1, 2]}'
    assert call(pool, "raw", kind="set").text == '"{1}"'


def test_objects_that_cannot_be_shown_are_errors(pool: ToolPool) -> None:
    assert call(pool, "hostile", kind="value").is_error
    assert call(pool, "hostile", kind="raise").text == "RuntimeError without a readable message"


def test_a_child_in_a_session_of_its_own_ends_with_the_call(pool: ToolPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert call(pool, "daemon", file=str(file)).text == "started"
    assert not is_alive(int(file.read_text()))


def test_a_tool_cannot_answer_for_another_call(pool: ToolPool) -> None:
    call(pool, "forger")
    assert [call(pool, "add", a=n).text for n in range(3)] == ["1", "2", "3"]


def test_memory_has_a_limit(pool: ToolPool) -> None:
    assert "MemoryError" in call(pool, "hungry", gigabytes=64).text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (ToolCall("subtract", {}), "there is no tool called 'subtract'; tools: add, later"),
        (ToolCall("add", {"a": "x"}), "argument 'a' should be integer"),
        (ToolCall("add", error="the call has no end"), "the call has no end"),
    ],
)
def test_calls_that_cannot_be_made_are_errors_for_the_model(pool: ToolPool, asked: ToolCall, message: str) -> None:
    result = asyncio.run(pool.call(asked))
    assert result.is_error
    assert message in result.text


def test_calls_run_at_the_same_time_and_close_ends_them_all(file: Path, tmp_path: Path) -> None:
    pool = ToolPool(ToolSpec([f"{file}:hang", f"{file}:daemon"], workers=2, timeout_s=60))

    async def close_early() -> list[ToolResult]:
        calls = [asyncio.create_task(pool.call(ToolCall("hang", {"seconds": 50.0}))) for _ in range(2)]
        await asyncio.sleep(0.5)
        await asyncio.get_running_loop().run_in_executor(None, pool.close)
        return await asyncio.gather(*calls)

    begin = time.monotonic()
    assert all(result.is_error for result in asyncio.run(close_early()))
    assert time.monotonic() - begin < 20


OWNER = """
import asyncio, sys
from tqppo.rollout.tools.calls import ToolCall
from tqppo.rollout.tools.pool import ToolPool, ToolSpec
call = ToolCall("daemon", {"file": sys.argv[2], "seconds": 600})
asyncio.run(ToolPool(ToolSpec([sys.argv[1]], workers=1)).call(call))
"""


def test_tools_and_their_children_end_when_their_owner_is_killed(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", OWNER, f"{file}:daemon", str(written)]) as owner:
        until(lambda: written.exists() and written.read_text())
        below = [*lifeline.descendants(owner.pid), int(written.read_text())]
        assert all(map(is_alive, below))
        owner.kill()
    until(lambda: not any(map(is_alive, below)))


def until(happened: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/tools.py:add", "there is no file /nowhere/tools.py"),
        ("{file}:subtract", "is not a function; write module:function or file.py:function"),
        ("no_such_module_of_test:add", "cannot be imported: No module named 'no_such_module_of_test'"),
        ("add", "is not a function"),
    ],
)
def test_tools_that_cannot_be_loaded_are_refused_with_the_reason(file: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        ToolPool(ToolSpec([path.format(file=file)]))


def test_two_tools_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(DataError, match="two tools called 'add'"):
        ToolPool(ToolSpec([f"{file}:add", f"{file}:add"]))


def test_results_are_cut_in_the_middle() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 4) == "ab\n… 5 characters left out …\nhi"
    assert as_text("é" * 10, 10) == "é" * 10
