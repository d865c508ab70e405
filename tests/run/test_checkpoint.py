"""Checkpoints: whole or not there, checked on opening, pruned, found by name."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tqppo.errors import CheckpointError, LockLost, OutOfSpace
from tqppo.run.checkpoint import Checkpoint, CheckpointStore, find_run, open_checkpoint
from tqppo.space import Digest

WEIGHTS = b"weights" * 1000


def save_some_weights(folder: Path) -> dict[str, Digest]:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_bytes(WEIGHTS)
    return {"actor/model.safetensors": Digest.of_bytes(WEIGHTS)}


def a_store(tmp_path: Path, **options: int) -> CheckpointStore:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_text("")
    return CheckpointStore(run / "checkpoints", **options)


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {"cursor": [0, 96]})
    found = store.newest()
    assert found.step == 3
    assert found.driver_state() == {"cursor": [0, 96]}
    assert (store.folder / "latest").resolve() == found.folder


def test_only_the_last_and_every_nth_are_kept(tmp_path: Path) -> None:
    store = a_store(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        store.write(step, save_some_weights, {})
    assert store.steps() == [4, 8, 9, 10]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "actor" / "model.safetensors").write_bytes(b"other"), "model.safetensors is corrupt"),
        (lambda folder: (folder / "actor" / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "driver.json").write_text("{ }"), "driver.json is corrupt"),
        (lambda folder: (folder / "MANIFEST.json").write_text("{"), "MANIFEST.json is corrupt"),
        (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
        (lambda folder: (folder / "MANIFEST.json").write_text("[" * 100_000), "MANIFEST.json is corrupt"),
    ],
)
def test_a_spoiled_checkpoint_is_refused_by_the_name_of_the_file(tmp_path: Path, spoil, named: str) -> None:
    folder = a_store(tmp_path).write(3, save_some_weights, {})
    spoil(folder)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder)


def edited(folder: Path, **changes: object) -> None:
    path = folder / "MANIFEST.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"files": {}}, "does not list driver.json"),
        ({"files": []}, "does not list driver.json"),
        ({"files": {"driver.json": None}}, "model.safetensors is not in MANIFEST.json"),
        ({"step": 4}, "it says step 4"),
        ({"step": "many"}, "MANIFEST.json is corrupt"),
        ({"run_files": {"../../../etc/passwd": {}}}, "outside of its folder, '../../../etc/passwd'"),
        ({"run_files": {"/etc/passwd": {}}}, "outside of its folder, '/etc/passwd'"),
        ({"format": 99}, "has checkpoint format 99"),
        ({"format": 1}, "has checkpoint format 1"),
        ({"format": None}, "MANIFEST.json is corrupt"),
        ({"format": 1e999}, "MANIFEST.json is corrupt"),
        ({"step": 1e999}, "MANIFEST.json is corrupt"),
        ({"run_files": {"x" * 5000: {}}}, "is missing"),
        ({"run_files": {"a\0b": {}}}, "is missing"),
        ({"run_files": None}, "MANIFEST.json is corrupt"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    folder = a_store(tmp_path).write(3, save_some_weights, {})
    edited(folder, **changes)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        open_checkpoint(folder)


def test_what_a_rank_has_hashed_is_not_read_again(tmp_path: Path) -> None:
    def save(folder: Path) -> dict[str, Digest]:
        save_some_weights(folder)
        return {"actor/model.safetensors": Digest(len(WEIGHTS), "as the rank says")}

    folder = a_store(tmp_path).write(3, save, {})
    assert json.loads((folder / "MANIFEST.json").read_text())["files"]["actor/model.safetensors"] == {
        "bytes": len(WEIGHTS),
        "sha256": "as the rank says",
    }


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"half")])
def test_without_the_part_of_every_rank_there_is_no_checkpoint(tmp_path: Path, spoil) -> None:
    def save(folder: Path) -> dict[str, Digest]:
        written = save_some_weights(folder)
        spoil(folder / "actor" / "model.safetensors")
        return written

    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})
    with pytest.raises(CheckpointError, match=r"run\.dir must be a folder that all nodes of the cluster share"):
        store.write(6, save, {})
    assert store.steps() == [3]
    assert not list(store.folder.glob(".partial*"))


def test_a_checkpoint_of_the_format_before_parts_is_read(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    edited(store.write(3, save_some_weights, {}), format=2)
    assert store.newest().step == 3


@pytest.mark.parametrize("name", ["../../config.resolved.toml", "/etc/passwd", "actor/../../../x"])
def test_a_checkpoint_s_own_files_are_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = a_store(tmp_path).write(3, save_some_weights, {})
    listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
    edited(folder, files={**listed, name: {"bytes": 0, "sha256": ""}})
    with pytest.raises(CheckpointError, match=re.escape(f"outside of its folder, {name!r}")):
        open_checkpoint(folder)


def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})
    folder = store.write(6, save_some_weights, {})
    unreadable = folder / "actor" / "model.safetensors"
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")  # a file of 0 bytes, of which none can be read
    listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
    edited(folder, files={**listed, "actor/model.safetensors": {"bytes": 0, "sha256": ""}})
    with pytest.raises(CheckpointError, match=r"actor/model\.safetensors cannot be read: Input/output error"):
        open_checkpoint(folder)
    assert store.newest().step == 3


def test_a_file_that_was_added_later_is_refused(tmp_path: Path) -> None:
    folder = a_store(tmp_path).write(3, save_some_weights, {})
    (folder / "actor" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json is not in MANIFEST"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "[actor]\n"])
def test_the_run_s_own_files_belong_to_the_checkpoint(tmp_path: Path, content: str) -> None:
    store = a_store(tmp_path)
    config = store.folder.parent / "config.resolved.toml"
    config.write_text("[actor]\nlr = 1e-3\n")
    store.run_files = lambda: [config]
    store.write(3, save_some_weights, {})
    store.newest()
    config.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.resolved\.toml is corrupt"):
        store.newest()


def test_without_a_readable_checkpoint_every_one_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    for step in (3, 6):
        (store.write(step, save_some_weights, {}) / "driver.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        store.newest()
    assert "step_000003/driver.json is missing" in str(refused.value)
    assert "step_000006/driver.json is missing" in str(refused.value)


def test_a_checkpoint_of_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})
    edited(store.write(6, save_some_weights, {}), format=99)
    with pytest.raises(CheckpointError, match="format 99"):
        store.newest()


def test_names_that_only_look_like_checkpoints_are_left_alone(tmp_path: Path) -> None:
    store = a_store(tmp_path, keep_last=1)
    for name in ("step_²", "step_", "step_best", ".later-step_best"):
        (store.folder / name).mkdir(parents=True)
    store.write(3, save_some_weights, {})
    store.write(6, save_some_weights, {})
    assert store.newest().step == 6
    assert (store.folder / "step_best").exists()


def test_no_checkpoint_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        a_store(tmp_path).newest()


def test_a_checkpoint_that_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})
    with pytest.raises(OutOfSpace, match="bytes are free there"):
        store.write(6, save_some_weights, {}, num_bytes=2**60)
    assert store.newest().step == 3
    assert not list(store.folder.glob(".partial*"))


def test_a_disk_that_fills_up_during_a_save_is_named_and_costs_nothing(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})

    def fills_up(folder: Path) -> dict[str, Digest]:
        save_some_weights(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutOfSpace, match=re.escape(str(store.folder))):
        store.write(6, fills_up, {})
    assert store.newest().step == 3
    assert not list(store.folder.glob(".partial*"))


@pytest.mark.parametrize("place", ["mkdir", "symlink_to", "rename"])
def test_a_disk_that_is_full_for_names_is_an_error_with_figures_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, place, full)
        with pytest.raises(OutOfSpace, match=re.escape(f"{store.folder} has no room for")):
            store.write(6, save_some_weights, {})
    assert store.newest().step == (6 if place == "symlink_to" else 3)  # `latest` comes after the checkpoint
    assert not list(store.folder.glob(".partial*"))


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = a_store(tmp_path).write(3, save_some_weights, {})
    path = folder / "actor" / "model.safetensors"
    spoiled = bytearray(path.read_bytes())
    spoiled[100] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(CheckpointError, match="corrupt"):
        open_checkpoint(folder)


def test_the_newest_complete_one_is_taken_when_a_newer_is_corrupt(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})
    newest = store.write(6, save_some_weights, {})
    (newest / "driver.json").unlink()
    warnings: list[str] = []
    found = store.newest(warnings.append)
    assert found.step == 3
    assert "driver.json is missing" in warnings[0]


def test_a_failed_save_leaves_the_one_before_and_is_cleaned_up(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.write(3, save_some_weights, {})

    def fails(folder: Path) -> dict[str, Digest]:
        save_some_weights(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write(6, fails, {})
    assert store.steps() == [3]
    store.write(7, save_some_weights, {})
    assert not list(store.folder.glob(".partial*"))


def test_a_run_is_found_by_name_by_path_and_as_the_latest(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    step = store.write(3, save_some_weights, {})
    runs, run = tmp_path / "runs", tmp_path / "runs" / "mine"
    assert find_run("mine", runs) == (run, None)
    assert find_run(str(run), runs) == (run, None)
    assert find_run("latest", runs) == (run, None)
    assert find_run(str(store.folder / "latest"), runs) == (run, None)
    assert find_run(str(step), runs) == (run, step)
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor a run; runs in .*: mine"):
        find_run("yours", runs)
    with pytest.raises(CheckpointError, match="no run in"):
        find_run("latest", tmp_path / "elsewhere")


WRITER = """
import sys
from pathlib import Path
from tqppo.run.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep_last=3)
def save(folder):
    for name in "abcdefgh":
        (folder / name).write_bytes(name.encode() * 200_000)
    return {}
step = 0
while True:
    step += 1
    store.write(step, save, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.01, 0.05, 0.11, 0.2])
def test_a_writer_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, delay_s: float) -> None:
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    done = int(process.stdout.readline())
    time.sleep(delay_s)
    process.kill()
    done = max([done, *map(int, process.communicate()[0].split())])
    newest = CheckpointStore(folder).newest()
    assert newest.step >= done
    assert json.loads((newest.folder / "driver.json").read_text()) == {"step": newest.step}


def test_checkpoints_after_the_one_that_a_run_goes_on_from_do_not_displace_its_new_ones(tmp_path: Path) -> None:
    store = a_store(tmp_path, keep_last=1, keep_every=2)
    for step in (2, 4, 6):
        store.write(step, save_some_weights, {"attempt": 1})
    assert store.set_later_aside(2) == [4, 6]
    assert store.newest().step == 2
    assert (store.folder / "latest").resolve().name == "step_000002"
    store.write(3, save_some_weights, {"attempt": 2})
    assert store.newest().step == 3  # a killed run goes on from here, and not from the first attempt's step 6
    assert sorted(path.name for path in store.folder.glob(".*")) == [".later-step_000004", ".later-step_000006"]
    store.write(5, save_some_weights, {"attempt": 2})
    assert [path.name for path in store.folder.glob(".later*")] == [".later-step_000006"]
    store.write(7, save_some_weights, {"attempt": 2})
    assert store.steps() == [2, 7]
    assert not list(store.folder.glob(".*"))


def test_a_checkpoint_that_was_set_aside_goes_once_its_step_is_there_again(tmp_path: Path) -> None:
    """A process that is killed between the save of a step and the removal of the one set aside leaves both."""
    store = a_store(tmp_path, keep_last=9)
    for step in (2, 4, 6):
        store.write(step, save_some_weights, {})
    store.set_later_aside(2)
    (store.folder / ".later-step_000004").rename(store.folder / "step_000004")
    (store.folder / ".later-step_000004").mkdir()
    store.remove_partial()
    assert [path.name for path in store.folder.glob(".later*")] == [".later-step_000006"]


def test_a_kill_while_later_checkpoints_are_hidden_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step in (1, 2, 3):
        store.write(step, lambda path: {}, {})
    rename = Path.rename

    def killed_after_one(path: Path, to: Path) -> Path:
        if list(store.folder.glob(".later-*")):
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_after_one)
        with pytest.raises(KeyboardInterrupt):
            store.set_later_aside(1)
    assert store.newest().step == 2
    store.write(3, lambda path: {}, {})
    assert not list(store.folder.glob(".later-*"))


def test_a_damaged_later_checkpoint_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    store = a_store(tmp_path, keep_last=1)
    store.write(6, save_some_weights, {})
    (store.folder / "step_000006" / "driver.json").unlink()
    saved = store.write(5, save_some_weights, {})
    assert saved.exists()


def test_a_run_file_that_is_changed_while_the_run_goes_on_does_not_pass_for_the_original(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    config = store.folder.parent / "config.resolved.toml"
    config.write_text("[actor]\nlr = 1e-3\n")
    store.run_files = lambda: [config]
    store.remember_run_files()
    config.write_text("[actor]\nlr = 1e-6\n")
    store.write(3, save_some_weights, {})
    with pytest.raises(CheckpointError, match=r"config\.resolved\.toml is corrupt"):
        store.newest()


def test_every_run_file_that_a_resume_reads_must_be_in_the_manifest(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    config, added = store.folder.parent / "config.resolved.toml", store.folder.parent / "model" / "tokenizer.json"
    store.run_files = lambda: [path for path in (config, added) if path.exists()]
    folder = store.write(3, save_some_weights, {})
    assert store.open(folder).step == 3
    added.parent.mkdir()
    added.touch()
    with pytest.raises(CheckpointError, match=r"model/tokenizer\.json is not in .*MANIFEST"):
        store.open(folder)
    added.unlink()
    edited(folder, run_files={})
    with pytest.raises(CheckpointError, match=r"config\.resolved\.toml is not in .*MANIFEST"):
        store.open(folder)


def test_a_process_that_lost_the_run_adds_and_removes_no_checkpoint(tmp_path: Path) -> None:
    store = a_store(tmp_path, keep_last=1)
    store.write(3, save_some_weights, {})

    def is_lost() -> None:
        raise LockLost("taken over")

    def save_until_it_is_lost(folder: Path) -> dict[str, Digest]:
        store.check = is_lost
        return save_some_weights(folder)

    other = store.folder / ".partial-step_000009-ab"  # the save of the process that took the run over

    def fail_once_it_is_lost(folder: Path) -> dict[str, Digest]:
        save_until_it_is_lost(folder)
        other.mkdir()
        raise OSError(errno.EIO, "the disk failed")

    with pytest.raises(LockLost):
        store.write(6, save_until_it_is_lost, {})
    assert store.steps() == [3]
    store.check = lambda: None
    with pytest.raises(OSError, match="the disk failed"):
        store.write(6, fail_once_it_is_lost, {})
    assert [path.name for path in store.folder.glob(".*")] == [other.name]


def test_a_reader_of_an_old_checkpoint_finds_it_whole_or_not_at_all(tmp_path: Path) -> None:
    """A process that is killed while it removes one leaves no half under its name; the next save removes the rest."""
    store = a_store(tmp_path, keep_last=1)
    old = store.write(3, save_some_weights, {})
    going = store.folder / ".partial-step_000003-0000"
    seen = []

    def save(folder: Path) -> dict[str, Digest]:
        seen.append(going.exists())
        return save_some_weights(folder)

    old.rename(going)  # as far as the killed process came
    store.write(6, save, {})
    assert seen == [False]
    assert store.steps() == [6]


def test_a_run_without_its_config_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    step = store.write(3, save_some_weights, {})
    config = store.folder.parent / "config.resolved.toml"
    config.unlink()
    for path in ("mine", str(step)):
        with pytest.raises(CheckpointError, match=f"{re.escape(str(config))} is missing"):
            find_run(path, tmp_path / "runs")


@pytest.mark.parametrize("text", ["[1]", "null", "", "{", "[" * 1000])
def test_a_driver_s_state_that_is_no_table_is_refused_whatever_its_hash_says(tmp_path: Path, text: str) -> None:
    (tmp_path / "driver.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"driver\.json (is corrupt|cannot be read)"):
        Checkpoint(tmp_path, 3).driver_state()


@pytest.mark.parametrize("name", ["step_\u0664", "step_4", "step_0000000001", f"step_{'9' * 200}", "step_00000a"])
def test_a_folder_that_only_resembles_a_checkpoint_is_left_alone(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / name).mkdir()
    for step in (1, 2):
        store.write(step, lambda path: {}, {})
    assert store.steps() == [2]
    assert store.newest().step == 2
    assert (tmp_path / name).is_dir()
