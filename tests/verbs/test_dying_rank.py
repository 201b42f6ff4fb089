"""A rank is killed in the middle of an exchange of coded gradients: the run ends, and its last words name that rank."""

from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import unisono
from tests.verbs.test_by_others import by_hand

pytestmark = pytest.mark.timeout(150)
PLAN = ("--plan", "dp=3 collective=ring codec=int8:dense=0+ef", "--train.global_batch", "12")
FATAL = '''

import signal
import torch.distributed as dist


def fatal(h):
    """Rank 1 is killed at its third message from here on."""
    if os.environ["RANK"] == "1":
        sent, send = [], dist.ProcessGroup.send

        def last(*args):
            sent.append(1)
            if len(sent) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(*args)

        dist.ProcessGroup.send = last
    return h


def dying(vocab): return Tiny(vocab, fatal)
'''


def folder(tmp_path: Path) -> Path:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="dying")
    model = place / "model.py"
    model.write_text(model.read_text() + FATAL)
    return place


def test_the_supervisor_names_it(tmp_path: Path) -> None:
    done = unisono(folder(tmp_path), "train", "recipe.toml", *PLAN, "--launch.recover", "false")
    assert done.code == 137 and done.left == ()
    assert done.block.startswith("error U-R02  killed by SIGKILL, rank 1")


def test_a_run_that_replaces_it_goes_on(tmp_path: Path) -> None:
    done = unisono(folder(tmp_path), "train", "recipe.toml", *PLAN)
    assert done.code == 0 and done.left == ()
    assert "rank 1 was lost (killed by SIGKILL): new processes for rank 1" in done.err


def test_the_others_name_it_where_nobody_supervises(tmp_path: Path) -> None:
    with by_hand(folder(tmp_path), "train", "recipe.toml", *PLAN, count=3) as ranks:
        first, dead, third = [rank.done() for rank in ranks]
    assert (first.code, dead.code, third.code) == (1, -9, 1)
    for rank, one in ((0, first), (2, third)):
        last = one.err.splitlines()[-1]
        assert last.startswith(f"rank {rank} stops: rank 1 has gone; rank {rank} waited in all_"), last
