"""A rank of a run with parameter servers is killed: nothing that was trained is lost, and no checkpoint is needed."""

from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import unisono

pytestmark = pytest.mark.timeout(200)

SINK = '''\
"""A sink that kills the rank of its name after step 6, once."""
import os
import signal
from typing import ClassVar

from unisono.spec.sink import Observer, Sink


class Fatal(Sink):
    """Kills its rank."""

    every_rank = True
    victim: ClassVar[int] = -1

    def open(self, run):
        return Killer(run.run_dir / "killed", run.rank == self.victim)


class Killer(Observer):
    def __init__(self, mark, kills):
        self.mark, self.kills = mark, kills

    def ended(self, step, stop):
        if step >= 6 and self.kills and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def observe(self, steps):
        return None
'''
VICTIM = '''

class Fatal{rank}(Fatal):
    """Kills rank {rank}."""

    name: ClassVar[str] = "fatal{rank}"
    victim: ClassVar[int] = {rank}
'''
KEYS = ("--train.save_every", "0", "--train.steps", "30", "--launch.servers", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = jobs.folder_with(
        tmp_path_factory.mktemp("lost"), jobs.RECIPE.replace("global_batch = 8", "global_batch = 6")
    )
    (place / "mine.py").write_text(SINK + "".join(VICTIM.format(rank=rank) for rank in range(3)))
    return place


@pytest.mark.parametrize(
    ("sync", "victim"),
    [
        ("ssp:s=2,copies=2", 0),
        pytest.param("ssp:s=2,copies=2", 1, marks=pytest.mark.slow),
        pytest.param("ssp:s=2", 2, marks=pytest.mark.slow),
        pytest.param("quorum:k=2,copies=2", 0, marks=pytest.mark.slow),
        pytest.param("async:copies=2", 1, marks=pytest.mark.slow),
    ],
)
def test_what_a_lost_rank_served_comes_back(folder: Path, sync: str, victim: int) -> None:
    done = unisono(
        folder, "train", "recipe.toml", "--json", "--plan", f"dp=3 sync={sync}", *KEYS,
        "--out.track", f"mine.py:Fatal{victim}",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.object["restarts"] == 1 and done.left == (), done.err
    (said,) = [line for line in done.err.splitlines() if "of which servers have everything" in line]
    assert (
        int(said.split("after step ")[1].split(",")[0]) >= 3
    )  # whoever has ended step 6 is two ahead at most
    assert [path.name for path in (folder / done.object["checkpoint"]).parent.iterdir()] == ["step-000030"]
