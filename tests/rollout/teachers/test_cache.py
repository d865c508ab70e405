"""The cache gives back the bytes that it was given, or nothing."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from disks import files_of_at_most

from tqppo.rollout.teachers.cache import ScoreCache, decoded, encoded, request_key


def arrays(seed: int = 0, rows: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 99, (rows, 3)).astype(np.int32)
    return {"teacher_ids": ids, "teacher_logprobs": rng.normal(size=(rows, 3)).astype(np.float32)}


def same(one: dict[str, np.ndarray] | None, other: dict[str, np.ndarray]) -> bool:
    return one is not None and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in other
    )


def opened(path: Path, max_bytes: int = 1 << 20) -> ScoreCache:
    cache = ScoreCache(path, max_bytes)
    cache.open()
    return cache


def test_what_was_put_comes_back_as_the_same_bytes_in_another_process_life(tmp_path: Path) -> None:
    cache = opened(tmp_path / "deep" / "math.sqlite")
    cache.put(b"key", arrays())
    cache.close()
    again = opened(tmp_path / "deep" / "math.sqlite")
    assert same(again.get(b"key"), arrays())
    assert again.get(b"other") is None
    again.close()


def test_arrays_of_any_shape_survive_as_bytes() -> None:
    given = {"a": np.zeros((0, 4), np.int16), "b": np.array([b"\n"[0]], np.uint8), "c": np.eye(3)}
    assert same(decoded(encoded(given)), given)


def test_replicas_share_one_file(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a.sqlite"), opened(tmp_path / "a.sqlite")
    one.put(b"key", arrays())
    assert same(other.get(b"key"), arrays())
    one.close()
    other.close()


def test_a_file_that_is_no_database_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with caplog.at_level(logging.WARNING):
        cache = opened(path)
    assert "starting with an empty cache" in caplog.text
    cache.put(b"key", arrays())
    assert same(cache.get(b"key"), arrays())
    cache.close()


def test_a_file_damaged_while_in_use_costs_only_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    cache = opened(path)
    for number in range(50):
        cache.put(str(number).encode(), arrays(number))
    cache.close()
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)  # everything after the first page
    path.write_bytes(content)
    cache = opened(path)
    found = [cache.get(str(number).encode()) for number in range(50)]
    assert all(each is None for each in found)
    cache.put(b"new", arrays())
    assert same(cache.get(b"new"), arrays())
    cache.close()


def test_an_entry_whose_bytes_changed_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    cache = opened(path)
    cache.put(b"key", arrays())
    cache.close()
    with sqlite3.connect(path) as base:
        (value,) = base.execute("SELECT value FROM scores").fetchone()
        base.execute("UPDATE scores SET value = ?", (value[:-1] + bytes([value[-1] ^ 1]),))
    base.close()
    cache = opened(path)
    assert cache.get(b"key") is None
    cache.close()


def test_the_oldest_entries_go_first_and_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    size = len(encoded(arrays(rows=1000)))
    cache = opened(path, max_bytes=10 * size)
    for number in range(40):
        cache.put(str(number).encode(), arrays(number, rows=1000))
    kept = [number for number in range(40) if cache.get(str(number).encode()) is not None]
    assert kept == list(range(40 - len(kept), 40))
    assert 8 <= len(kept) <= 10
    cache.close()
    assert path.stat().st_size < 13 * size


@pytest.mark.parametrize("path", ["folder", "file/a.sqlite"])  # neither can be made
def test_without_a_place_to_write_a_teacher_does_without_its_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        cache = opened(tmp_path / path)
    assert "scores are not kept" in caplog.text
    cache.put(b"key", arrays())
    assert cache.get(b"key") is None


def test_what_finds_the_disk_full_is_passed_over_and_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = len(encoded(arrays(rows=1000)))
    cache = opened(tmp_path / "a.sqlite", max_bytes=10 * size)
    cache.put(b"before", arrays())
    with files_of_at_most(size):
        for number in range(20):
            cache.put(str(number).encode(), arrays(number, rows=1000))
    assert "a.sqlite: " in caplog.text
    assert same(cache.get(b"before"), arrays())  # what was not kept does not count towards the limit
    cache.put(b"after", arrays(1))
    assert same(cache.get(b"after"), arrays(1))
    cache.close()


def test_with_no_room_nothing_is_kept_and_no_file_made(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a.sqlite", max_bytes=0)
    cache.put(b"key", arrays())
    assert cache.get(b"key") is None
    assert not (tmp_path / "a.sqlite").exists()


def test_a_key_tells_teachers_questions_and_tokens_apart() -> None:
    keys = {
        request_key("t", "8", [[1, 2, 3]], [1]),
        request_key("u", "8", [[1, 2, 3]], [1]),
        request_key("t", "9", [[1, 2, 3]], [1]),
        request_key("t", "8", [[1, 2, 4]], [1]),
        request_key("t", "8", [[1, 2, 3]], [0]),
        request_key("t", "8", [[1, 2], [3]], [1, 0]),
        request_key("t", "8", [[1], [2, 3]], [0, 1]),
    }
    assert len(keys) == 7
    assert request_key("t", "8", [[1, 2, 3]], [1]) in keys
