"""Killed between any two file operations, a save leaves a whole checkpoint in force; a failing disk does too."""

import errno
import os
import shutil
from contextlib import contextmanager

import pytest
import torch

from tests.train.state.checkpoint.cuts import make, save_all
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, latest, load, newest_whole, read_full, save, verify_folder
from unisono.train.state.checkpoint.find import step_of

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "close")
CHANGES = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
RANKS = [[("w", (0, 0), (2, 4)), ("step", (), ())], [("w", (2, 0), (3, 4))]]


class Killed(BaseException):
    """As `kill -9`: no handler of errors sees it."""


def tensors(step):
    return {"w": make((5, 4), torch.float32, step), "step": torch.tensor(step)}


def state_of(step, tag):
    return {"step": step, "tag": tag}


@contextmanager
def file_operations(strike):
    """Every changing call of `os` first calls strike(name, number, arguments); a write is done by half before it."""
    true = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def wrap(name):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if name == "write":
                fd, data = arguments
                half = len(data) // 2
                true["write"](fd, data[:half])
                strike(name, count, arguments)
                return half + true["write"](fd, data[half:])
            strike(name, count, arguments)
            # What reaches the disk first is tested by the order of calls; the calls themselves would take minutes.
            return None if name == "fsync" else true[name](*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(os, name, function)


def start(run_dir):
    with file_operations(lambda *_: None):
        for step in (1, 2):
            save_all(run_dir, step, tensors(step), RANKS, state_of(step, "old"), token=f"first{step}")


def check_whole(run_dir, allowed):
    """`latest` and `newest_whole` are one whole checkpoint, of a step and tag that is allowed, with its own values."""
    folder = latest(run_dir)
    assert folder is not None and folder == newest_whole(run_dir) and verify_folder(folder) == []
    state = load(folder, [])
    assert (state["step"], state["tag"]) in allowed
    full = read_full(folder)
    assert all(torch.equal(full[name], tensor) for name, tensor in tensors(state["step"]).items())
    return state["step"], state["tag"]


def count_operations(run_dir, step, keep):
    total = []
    with file_operations(lambda name, number, _: total.append(name)):
        save_all(run_dir, step, tensors(step), RANKS, state_of(step, "new"), token="second", keep=keep)
    return len(total)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("step", "keep"), [(3, None), (3, 1), (2, None), (2, 1)])
def test_killed_between_any_two_operations(tmp_path, step, keep):
    template = tmp_path / "template"
    start(template)
    shutil.copytree(template, tmp_path / "dry")
    total = count_operations(tmp_path / "dry", step, keep)
    outcomes = []
    for last in range(1, total + 1):
        run_dir = tmp_path / f"killed{last}"
        shutil.copytree(template, run_dir)

        def strike(name, number, arguments, last=last):
            if number >= last:
                raise Killed

        with pytest.raises(Killed), file_operations(strike):
            save_all(run_dir, step, tensors(step), RANKS, state_of(step, "new"), token="second", keep=keep)
        outcomes.append(check_whole(run_dir, {(2, "old"), (step, "new")}))
        # The next save goes through and leaves no trace of the dead one.
        with file_operations(lambda *_: None):
            save_all(run_dir, 4, tensors(4), RANKS, state_of(4, "next"), token="third")
        check_whole(run_dir, {(4, "next")})
        names = {path.name for path in (run_dir / "checkpoints").iterdir()}
        assert all(step_of(run_dir / name) and "." not in name for name in names)
        assert all(verify_folder(run_dir / "checkpoints" / name) == [] for name in names)
        shutil.rmtree(run_dir)
    # Both sides of the rename were tried, and the new one never gave way to the old one again.
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == (step, "new"))
    assert {(2, "old"), (step, "new")} == set(outcomes)


def test_everything_is_on_disk_before_it_is_visible(tmp_path):
    """Order of operations: each file is fsynced, then its folder, before the rename; `latest` after that."""
    log = []

    def note(name, number, arguments):
        target = arguments[0]
        log.append((name, os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to name descriptors")
    with file_operations(note):
        save_all(tmp_path, 3, tensors(3), RANKS, {}, token="x")
    appear = next(i for i, (name, path) in enumerate(log) if name == "rename" and ".tmp-" in path)
    tmp = log[appear][1]
    for file in (
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        f".manifest.json.{os.getpid()}.part",
        "",
    ):
        at = [
            i for i, (name, path) in enumerate(log) if name == "fsync" and path == f"{tmp}/{file}".rstrip("/")
        ]
        written = [i for i, (name, path) in enumerate(log) if name == "write" and path == f"{tmp}/{file}"]
        assert at and max(at) < appear and max(written, default=-1) < max(at), file
    settled = log.index(("fsync", str(tmp_path / "checkpoints")))
    moved = log.index(("replace", str(tmp_path / f".latest.{os.getpid()}.part")))
    assert (
        appear < settled < moved and ("fsync", str(tmp_path / f".latest.{os.getpid()}.part")) in log[:moved]
    )
    assert ("fsync", str(tmp_path)) in log[moved:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lasting", [True, False], ids=["from-then-on", "once"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_is_one_clear_error_and_changes_nothing(tmp_path, lasting, number):
    template = tmp_path / "template"
    start(template)
    shutil.copytree(template, tmp_path / "dry")
    total = count_operations(tmp_path / "dry", 3, None)
    failures = 0
    for first in range(1, total + 1):
        run_dir = tmp_path / f"run{first}"
        shutil.copytree(template, run_dir)

        def strike(name, count, arguments, first=first):
            # A full disk still removes and renames; a read-only or broken one does nothing.
            spared = number == errno.ENOSPC and name in ("unlink", "rename", "rmdir", "replace")
            if (count >= first if lasting else count == first) and not spared:
                raise OSError(number, os.strerror(number))

        try:
            with file_operations(strike):
                save_all(run_dir, 3, tensors(3), RANKS, state_of(3, "new"), token="second", patience=0.01)
        except UsageError as error:
            failures += 1
            assert error.code == "K02" and "step-3 could not be written" in error.what
            assert os.strerror(number) in error.what or "nothing was heard" in error.what
        check_whole(run_dir, {(2, "old"), (3, "new")})
        shutil.rmtree(run_dir)
    assert failures > total / 3


def test_a_refused_rename_gives_the_replaced_checkpoint_its_name_back(tmp_path):
    start(tmp_path)

    def strike(name, number, arguments):
        if name == "rename" and ".tmp-" in str(arguments[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(UsageError), file_operations(strike):
        save_all(tmp_path, 2, tensors(2), RANKS, state_of(2, "new"), token="second")
    assert check_whole(tmp_path, {(2, "old")}) and latest(tmp_path).name == "step-000002"


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=15)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError) as caught:
        save(tmp_path, 1, [Box("w", (4,), (0,), torch.zeros(4))], {})
    assert caught.value.code == "K02" and "disk is full" in caught.value.likely and latest(tmp_path) is None
    assert not list(tmp_path.glob("checkpoints/*/*.safetensors"))


def test_an_unusable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        save(tmp_path / "file", 1, [Box("w", (4,), (0,), torch.zeros(4))], {})
    assert caught.value.code == "K02" and "Not a directory" in caught.value.what


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_leaves_the_newest(tmp_path, keep):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, [Box("w", (1,), (0,), torch.ones(1))], {}, keep=keep)
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == [f"step-{s:06d}" for s in range(max(1, step - keep + 1), step + 1)]
    # Resumed from an earlier step: the future that was left goes first, what was just saved never.
    save(tmp_path, 3, [Box("w", (1,), (0,), torch.ones(1))], {}, keep=1)
    assert latest(tmp_path) == newest_whole(tmp_path) == tmp_path / "checkpoints/step-000003"
    assert not (tmp_path / "checkpoints/step-000004").exists()
