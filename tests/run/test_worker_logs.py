"""Logs of Ray's workers have the names of roles."""

from __future__ import annotations

from pathlib import Path

from tqppo.run.worker_logs import keep_worker_logs, role_of

RANK = ":job_id:01000000\n:actor_name:RankProcess\n:actor_name:actor-0\n"


def write(session: Path, name: str, text: str) -> None:
    folder = session / "session_2026" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_a_log_is_named_by_the_role_and_has_what_it_printed(tmp_path: Path) -> None:
    write(tmp_path, "worker-aa-01-7.err", f"{RANK}loading\n")
    write(tmp_path, "worker-aa-01-7.out", RANK)
    for number in (1, 2):
        write(tmp_path, f"worker-b{number}-01-{number}.out", f":actor_name:RolloutWorker\nengine {number}\n")
    kept = tmp_path / "kept"
    kept.mkdir()
    keep_worker_logs(tmp_path, kept)
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "actor-0.err": "loading\n",
        "rollout.out": "engine 1\n",
        "rollout-2.out": "engine 2\n",
    }


def test_a_worker_that_printed_nothing_has_no_log(tmp_path: Path) -> None:
    write(tmp_path, "worker-aa-01-7.err", RANK)
    kept = tmp_path / "kept"
    kept.mkdir()
    keep_worker_logs(tmp_path, kept)
    assert not list(kept.iterdir())


def test_a_worker_without_a_role_and_a_name_that_is_no_file_s_are_workers() -> None:
    assert role_of(b"hello\n") == "worker"
    assert role_of(b":job_id:01000000\n:actor_name:../../x\n") == "worker"
    assert role_of(b":actor_name:IndexActor\n") == "queue-index"
