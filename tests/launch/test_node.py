"""The ranks of a node: their variables, their signals, and what the node leaves with."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.launch.env import detect
from unisono.spec.errors import UsageError
from unisono_contrib.launch.node import code_of, environments
from unisono_contrib.launch.nodes import node_in

pytestmark = pytest.mark.timeout(60)
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
PET = {
    "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "2",
}  # fmt: skip
RANK = """\
import os, signal, sys, time, pathlib
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
what = sys.argv[int(os.environ["RANK"]) + 1]
pathlib.Path("rank" + os.environ["RANK"]).touch()
if what != "wait":
    sys.exit(int(what))
while True:
    time.sleep(0.02)
"""


def node(folder: Path, *what: str, send: int | None = None, patience: str = "30") -> int:
    """What a node of two ranks leaves with, each of which leaves with its number or waits for a signal."""
    (folder / "rank_play.py").write_text(RANK)
    for begun in folder.glob("rank?"):
        begun.unlink()
    words = ["--ranks", "2", "--nodes", "1", "--master", "localhost:29500", "--patience", patience, "--"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono_contrib.launch.node", *words, "rank_play", *what], cwd=folder
    )
    if send is not None:
        while not all((folder / f"rank{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(send)
    return process.wait(timeout=30)


def test_a_node_leaves_with_what_its_ranks_left_with(tmp_path: Path) -> None:
    assert node(tmp_path, "0", "0") == 0
    assert node(tmp_path, "75", "75") == 75
    assert node(tmp_path, "1", "wait", patience="0.1") == 1, "the other one is ended"
    assert node(tmp_path, "wait", "wait", send=signal.SIGUSR1) == 75


@pytest.mark.parametrize(
    ("codes", "code"), [((), 0), ((0, 75), 75), ((75, 1), 1), ((1, 2), 2), ((-9, 75), 137), ((0, 0), 0)]
)
def test_code_of(codes: tuple[int, ...], code: int) -> None:
    assert code_of(codes) == code


@pytest.mark.parametrize(("environ", "ranks"), [(SKY, 0), (DSTACK, 0), (PET, 2)])
def test_nodes_are_known_by_their_scheduler(environ: dict[str, str], ranks: int) -> None:
    place = node_in(environ)
    assert place is not None and (place.node, place.nodes, place.ranks) == (1, 2, ranks)
    assert place.master == "10.0.0.1"
    for name in environ:
        if name not in ("PET_MASTER_PORT", "PET_NPROC_PER_NODE"):
            rest = {key: value for key, value in environ.items() if key != name}
            try:
                assert node_in(rest) is None
            except UsageError as error:
                assert name in error.what


def test_ranks_of_a_node_have_plain_variables() -> None:
    place = node_in(PET)
    assert place is not None
    seen = [detect(environ) for environ in environments(place, {**PET, "HOME": "/"})]
    assert [(one.rank, one.world, one.local_rank, one.local_world) for one in seen if one] == [
        (2, 4, 0, 2),
        (3, 4, 1, 2),
    ]
    assert {(one.master, one.port) for one in seen if one} == {("10.0.0.1", 29400)}


@pytest.mark.parametrize("environ", [SKY, DSTACK])
def test_a_node_of_one_gpu_is_a_rank_and_one_of_several_is_refused(environ: dict[str, str]) -> None:
    place = detect(environ)
    assert place is not None and (place.rank, place.world, place.master) == (1, 2, "10.0.0.1")
    prefix = next(iter(environ)).partition("_")[0]
    gpus = {"SKYPILOT": "SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK": "DSTACK_GPUS_PER_NODE"}[prefix]
    with pytest.raises(UsageError, match="2 nodes, which have 8 GPUs"):
        detect({**environ, gpus: "8"})


def test_a_single_node_starts_its_ranks_itself() -> None:
    assert (
        detect(
            {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
        )
        is None
    )


def test_a_node_that_does_not_know_its_place_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unisono_contrib.launch.node", "--", "rank_play"], capture_output=True, text=True,
        env={**os.environ, "JOB_COMPLETION_INDEX": "1"}, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "error U-L02  Kubernetes says node 1 of 0" in done.stderr
