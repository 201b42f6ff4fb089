"""A rank that alone held a part of the run is killed, twice: the run ends with the bits of an undisturbed one, and needs
no checkpoint for it."""

import hashlib
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import unisono
from unisono.train.state.checkpoint import read_full

pytestmark = pytest.mark.timeout(200)

SINK = '''\
"""A sink that kills its rank: rank 0 after step 5, rank 1 after step 10; each once."""
import os
import signal
from pathlib import Path

from unisono.spec.sink import Observer, Sink


class Fatal(Sink):
    """Kills its rank."""

    name = "fatal"
    every_rank = True

    def open(self, run):
        return Killer(run.run_dir / f"killed{run.rank}", {0: 5, 1: 10}.get(run.rank))


class Killer(Observer):
    def __init__(self, mark, at):
        self.mark, self.at = mark, at

    def ended(self, step, stop):
        if step == self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def observe(self, steps):
        return None
'''
KEYS = ("--train.save_every", "0", "--train.steps", "14", "--launch.snapshot_every", "2")


def bits(checkpoint: Path) -> str:
    """SHA-256 over all tensors of a checkpoint, by name."""
    digest = hashlib.sha256()
    for name, x in sorted(read_full(checkpoint).items()):
        digest.update(name.encode() + x.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = jobs.folder_with(tmp_path_factory.mktemp("lost"))
    (place / "mine.py").write_text(SINK)
    return place


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    done = unisono(folder, "train", "recipe.toml", "--json", "--plan", "dp=1 sync=canonical", *KEYS)
    assert done.object["restarts"] == 0
    return bits(folder / done.object["checkpoint"])


@pytest.mark.parametrize("plan", ["shard=2", "pp=2"])
def test_what_one_rank_alone_held_comes_back(folder: Path, undisturbed: str, plan: str) -> None:
    done = unisono(
        folder, "train", "recipe.toml", "--json", "--plan", f"{plan} sync=canonical", *KEYS,
        "--out.track", "mine.py:Fatal",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.object["restarts"] == 2 and done.left == ()
    assert "going on after step 4 by snapshots of ranks 0, 1; 1 step again" in done.err
    assert "going on after step 8 by snapshots of ranks 0, 1; 2 steps again" in done.err
    last = folder / done.object["checkpoint"]
    assert bits(last) == undisturbed
    made = [path.name for path in last.parent.iterdir()]
    assert made == ["step-000014"]
