"""Typical mistakes: each one clear error in the contract's shape, the right exit code, nothing left running or half made."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import Done, unisono

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Mistake:
    """Flags that make it, and what must be said: code, a part of the error's first line, of `where`, of `try`."""

    flags: tuple[str, ...]
    code: str
    what: str
    where: str
    fix: str


# All of these are found before torch is imported.
AT_ONCE = {
    "a misspelt key": Mistake(("--train.stpes", "5"), "C01", "did you mean train.steps?", "flag --train.stpes", "train.steps"),
    "batch numbers that do not multiply": Mistake(
        ("--plan", "dp=2 pp=2 micros=3"), "P", "global_batch", "train.global_batch", "global_batch",
    ),
    "more ranks of tp than heads": Mistake(("--plan", "tp=4"), "P12", "tp=4 splits the heads, and there are 2", "model.n_head", "tp"),
    "more ranks than samples in a batch": Mistake(("--plan", "dp=16"), "P", "global_batch", "plan", "global_batch"),
    "no such data": Mistake(("--data.source", "text:nothing.txt"), "D02", "no such file or folder: nothing.txt", "--data.source", "absolute"),
    "unreadable data": Mistake(("--data.source", "text:/proc/self/mem"), "D03", "cannot read", "/proc/self/mem", "ls -l"),
    "an empty file": Mistake(("--data.source", "text:empty.txt"), "D04", "empty", "empty.txt", "text:PATH"),
    "an output folder that cannot be": Mistake(("--out.dir", "/proc/x"), "O01", "cannot write", "/proc/x", "--out.dir"),
    "an output folder below a file": Mistake(("--out.dir", "words.txt"), "O01", "Not a directory", "words.txt/tiny", "--out.dir"),
    "a model file without the function": Mistake(
        ("--model.kind", "model.py:godo"), "C06", "no function godo; did you mean good?", "model.kind", "good raising",
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").touch()
    return jobs.folder_with(tmp_path)


def check(done: Done, mistake: Mistake, place: Path) -> None:
    """What holds for every mistake of usage."""
    said = done.object
    assert done.code == said["exit"] == 2, done.err
    head, *rows = done.block.splitlines()
    shown = {row[2:9].strip(): row[10:] for row in rows}
    assert head.startswith(f"error U-{mistake.code}") and mistake.what in head
    assert mistake.where in shown["where"] and mistake.fix in shown["try"]
    assert (said["where"], said["try"]) == (shown["where"], shown["try"])
    assert said["code"] in head and said["what"] in head
    assert "Traceback" not in done.err
    assert done.left == ()
    assert not (place / "runs").exists() or not list((place / "runs").rglob("*")), "nothing half made"


@pytest.mark.parametrize("name", AT_ONCE)
def test_one_clear_error_at_once(name: str, place: Path) -> None:
    done = unisono(place, "train", "recipe.toml", "--json", *AT_ONCE[name].flags)
    check(done, AT_ONCE[name], place)


@pytest.mark.root
def test_a_read_only_disk(place: Path, tmp_path: Path) -> None:
    with jobs.small_disk(tmp_path / "disk", "size=1m,ro") as disk:
        done = unisono(place, "train", "recipe.toml", "--json", "--out.dir", str(disk))
    check(done, Mistake((), "O01", "Read-only file system", str(disk), "--out.dir"), place)
    assert "read-only" in done.block


def test_fewer_samples_than_a_step_takes(place: Path) -> None:
    """Found where the data is read, in the ranks."""
    (place / "short.txt").write_text("just a few words, " * 3)
    flags = ("--data.source", f"text:{place}/short.txt", "--data.val_fraction", "0")
    done = unisono(place, "train", "recipe.toml", "--json", *flags)
    check(
        done,
        Mistake(flags, "D05", "the data has 6 training samples, one step needs 8", "short.txt", "smaller"),
        place,
    )


def test_a_port_in_use_under_torchrun(place: Path) -> None:
    """What torchrun gives its ranks when they are to open the port themselves; its own store says so by itself."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        given = {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        done = unisono(place, "train", "recipe.toml", "--plan", "dp=2", "--json", environ=given)
    check(
        done,
        Mistake((), "L01", f"port {port} is in use", f"MASTER_PORT={port}", "another MASTER_PORT"),
        place,
    )


def test_a_rank_that_raises(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="raising")
    done = unisono(place, "train", "recipe.toml", "--json")
    said = done.object
    assert done.code == said["exit"] == 1 and done.left == ()
    assert done.err.count("Traceback") == done.err.count("ValueError: the tokens ran out\n") == 1
    head, *rows = done.block.splitlines()
    assert head.startswith("error U-R01  ValueError: the tokens ran out, rank 1, host ")
    assert "model.py:" in rows[0] and rows[0].endswith(" in raises")
    assert rows[1] == "  likely  rank 0 was stopped because of it"
    (run,) = jobs.runs_of(place)
    assert f"kept    checkpoints/step-000003: unisono train --resume runs/mine/{run.name}\n" in done.err
    assert jobs.checkpoints(run) == ["step-000003"], "what it had saved is still there"
    assert jobs.error_of(run) == said


@pytest.mark.slow
def test_torchrun_says_once_what_a_rank_raised(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="raising")
    program = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "unisono",
    )
    done = unisono(place, "train", "recipe.toml", program=program)
    assert done.code == 1 and done.left == ()
    assert [block.splitlines()[0].partition(",")[0] for block in done.blocks] == [
        "error U-R01  ValueError: the tokens ran out"
    ]
    ours = done.err[
        : done.err.index("ChildFailedError")
    ]  # from there on torchrun tells it again, in its own way
    assert ours.count("the tokens ran out\n") == 1
    assert ours.count("Traceback (your lines") == 1
    root = done.err[done.err.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in root and "model.py:" in root and " in raises\n" in root
    (run,) = jobs.runs_of(place)
    assert jobs.error_of(run)["what"] == "ValueError: the tokens ran out"
