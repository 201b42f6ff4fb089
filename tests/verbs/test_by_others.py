"""The same command under torchrun, and under RANK, WORLD_SIZE and MASTER_* set by hand."""

import contextlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ports import kept_port
from tests.verbs import jobs
from tests.verbs.jobs import checkpoints, losses, started, unisono

ROOT = Path(__file__).parents[2]
ODD = ("data", "backend", "checkpoint")
pytestmark = pytest.mark.timeout(150)

TORCHRUN = "torch.distributed.run"


def test_torchrun_trains_into_one_run_folder(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    argv = ["--standalone", "--nproc-per-node=2", "-m", "unisono", "train", "recipe.toml", "--plan", "dp=2"]
    done = unisono(place, *argv, "--json", module=TORCHRUN)
    assert done.code == 0 and done.left == (), done.err
    (run,) = jobs.runs_of(place)
    said = done.object
    assert (said["ranks"], said["steps"], said["run_dir"]) == (2, 12, f"runs/mine/{run.name}")
    assert list(losses(run)) == list(range(1, 13))
    assert checkpoints(run)[-1] == "step-000012"
    assert (run.parent / "latest").read_text() == run.name + "\n"
    assert {path.name for path in (run / "events").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}


def test_two_ranks_started_by_hand(tmp_path: Path) -> None:
    """One of them from the start, killed in between; both of them again with --resume; then with nothing to do."""
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    with by_hand(place, "train", "recipe.toml", "--json") as ranks:
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert done[1].out == "", "one object, from rank 0"
    (run,) = jobs.runs_of(place)
    assert done[0].object["run_dir"] == f"runs/mine/{run.name}"
    assert list(losses(run)) == list(range(1, 13))
    assert [one.left for one in done] == [(), ()]


@pytest.mark.slow
def test_sigterm_to_ranks_started_by_others_saves(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    with by_hand(place, "train", "recipe.toml", "--train.steps", "100000") as ranks:
        run = ranks[0].steps(5)
        os.kill(ranks[1].process.pid, signal.SIGTERM)
        os.kill(ranks[0].process.pid, signal.SIGTERM)
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [75, 75]
    assert done[0].block.startswith("error U-S01  stopped as asked; the run is saved")
    assert checkpoints(run)[-1] == f"step-{len(losses(run)):06d}"


def test_what_all_ranks_raise_is_told_once(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="raising")
    model = place / "model.py"
    model.write_text(model.read_text().replace('if os.environ["RANK"] == "1":', "if h is not None:"))
    with by_hand(place, "train", "recipe.toml") as ranks:
        first, second = [rank.done() for rank in ranks]
    assert (first.code, second.code) == (1, 1)
    assert first.block.startswith("error U-R01  ValueError: the tokens ran out, rank 0, host")
    assert "every rank raised it" in first.block and first.err.count("Traceback") == 1
    assert second.err.splitlines()[-1] == "rank 1 stops: ValueError: the tokens ran out, rank 0"
    assert "Traceback" not in second.err and "error U-" not in second.err


@contextlib.contextmanager
def by_hand(place: Path, *argv: str, count: int = 2, **more: Any):
    """Ranks that meet at a port which is kept for them."""
    with contextlib.ExitStack() as stack:
        port = str(stack.enter_context(kept_port()))
        yield [
            stack.enter_context(
                started(
                    place,
                    *argv,
                    environ={
                        "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port, "PYTHONPATH": f"{ROOT}:{ROOT}/src",
                    },
                    **more,
                )
            )
            for rank in range(count)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("odd", "how"),
    [("data", "by hand"), *(pytest.param(odd, "torchrun", marks=pytest.mark.slow) for odd in ODD)],
)
def test_one_rank_of_four_that_differs_is_named_before_the_first_step(
    tmp_path: Path, odd: str, how: str
) -> None:
    """Rank 2 has another file, another backend, or a checkpoint that it cannot read. All refuse; rank 0 says it all."""
    place = jobs.folder_with(
        tmp_path / "all", jobs.USERS.replace("text:{text}", "text:words.txt"), function="good"
    )
    argv = ["train", "recipe.toml", "--plan", "dp=4"]
    if odd == "checkpoint":
        assert (
            unisono(
                place,
                "train",
                "recipe.toml",
                "--plan",
                "dp=1",
                "--train.steps",
                "3",
                "--train.micro_batch",
                "2",
            ).code
            == 0
        )
        (run,) = jobs.runs_of(place)
        argv = ["train", "--resume", str(run.relative_to(place)), "--plan", "dp=4", "--train.steps", "6"]
    shutil.copytree(place, tmp_path / "rank2")
    if odd == "data":
        (tmp_path / "rank2/words.txt").write_text(jobs.words(3001))
    elif odd == "backend":
        (tmp_path / "rank2/nccl").touch()
    else:
        (tmp_path / "rank2" / run.relative_to(place) / "checkpoints/step-000003/manifest.json").unlink()
    if how == "torchrun":
        argv = ["--standalone", "--nproc-per-node=4", "-m", "tests.verbs.odd_rank", *argv]
        done = unisono(place, *argv, module=TORCHRUN, environ={"PYTHONPATH": f"{ROOT}:{ROOT}/src"})
    else:
        with by_hand(place, *argv, count=4, module="tests.verbs.odd_rank") as ranks:
            ends = [rank.done() for rank in ranks]
        done = replace(
            ends[0], err="".join(end.err for end in ends), left=tuple(pid for end in ends for pid in end.left)
        )
    what = {
        "data": "U-L05  ranks differ: data is ",
        "backend": "U-L05  ranks differ: backend is nccl, the others have gloo",
        "checkpoint": "U-K01  checkpoint step-3 is damaged: manifest.json: is missing",
    }[odd]
    assert done.code != 0 and done.left == (), done.err
    assert len(done.blocks) == 1, done.err
    (block,) = done.blocks
    head = block.splitlines()[0]
    assert head.startswith(f"error {what}") and ", rank 2, host " in head, done.err
    for rank in (1, 2, 3):
        # By hand, rank 0 keeps the store where ranks meet: once it has left, others know only that it has.
        words = what.partition("  ")[2] if how == "torchrun" else ""
        assert f"rank {rank} stops: {words}" in done.err
    assert [list(losses(run)) for run in jobs.runs_of(place)] == ([[1, 2, 3]] if odd == "checkpoint" else [])
