"""What Ray's workers printed, copied into a run's folder under the names of their roles. `cluster` calls it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

MARKER = re.compile(rb":(job_id|actor_name|task_name):(.*)")  # lines that Ray writes into its workers' logs
ROLES = {
    "RolloutWorker": "rollout",
    "TeacherWorker": "teacher",
    "Estimator": "estimator",
    "IndexActor": "queue-index",
    "Sender": "weight-sender",
    "RankProcess": "rank",
}


def keep_worker_logs(session: Path, logs: Path) -> None:
    """Copy the logs of each worker that printed something, as `actor-0.err` and so on; Ray's own lines are left out."""
    taken: Counter[str] = Counter()
    by_worker: dict[str, list[Path]] = {}
    for path in sorted(session.glob("session_2*/logs/worker-*.*")):
        if path.is_file():
            by_worker.setdefault(path.stem, []).append(path)
    for files in by_worker.values():
        printed = {path.suffix: path.read_bytes() for path in files}
        role = role_of(b"".join(printed.values()))
        texts = {suffix: without_markers(text) for suffix, text in printed.items()}
        if not any(texts.values()):
            continue
        taken[role] += 1
        name = role if taken[role] == 1 else f"{role}-{taken[role]}"
        for suffix, text in texts.items():
            if text:
                _write(logs / f"{name}{suffix}", text)


def _write(path: Path, text: bytes) -> None:
    """Write a file. Half of it, on a full disk, gives its room back."""
    try:
        path.write_bytes(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def role_of(text: bytes) -> str:
    """The role that a worker had last, by the names that Ray wrote into its log."""
    names = [match[2].decode(errors="replace").strip() for match in map(MARKER.match, text.splitlines()) if match]
    known = [name for name in names if re.fullmatch(r"[A-Za-z][\w.-]*", name)]
    return ROLES.get(known[-1], known[-1]) if known else "worker"


def without_markers(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if not MARKER.match(line))
