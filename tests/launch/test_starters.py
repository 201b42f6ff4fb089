"""A starter of one's own is one file: found, asked in its turn, its mistakes told like the others'."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TOY = '''
"""A toy."""
from typing import ClassVar
from unisono.launch.starters import Environ, Started, Starter, number, required

class Toy(Starter):
    """`TOY_RANK` of `TOY_RANKS`."""
    name: ClassVar[str] = "toy"
    turn: ClassVar[int] = 5

    def detect(self, environ: Environ) -> Started | None:
        if "TOY_RANK" not in environ:
            return None
        required(environ, ["TOY_RANKS"], "toy")
        rank, ranks = number(environ, "TOY_RANK"), number(environ, "TOY_RANKS")
        return Started("toy", rank, ranks, rank, ranks, "127.0.0.1", 29500)

    def leaves(self, host, local_rank, hosts):
        return {"TOY_RANK": str(local_rank), "TOY_RANKS": str(sum(hosts))}
'''

ASK = """
import json, os
from unisono.launch.starters import STARTERS, detect
from unisono.spec.errors import UsageError
try:
    place = detect(os.environ)
    print(json.dumps([STARTERS.names(), place and [place.source, place.rank, place.world]]))
except UsageError as error:
    print(json.dumps([STARTERS.names(), error.what]))
"""


def test_a_toy_is_found_asked_first_and_checked(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src" / "unisono", tmp_path / "unisono", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "unisono/launch/starters/toy.py").write_text(TOY)
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for environ, expected in (
        ({"TOY_RANK": "1", "TOY_RANKS": "3"} | plain, ["toy", 1, 3]),
        (plain, ["environment", 0, 2]),
        ({}, None),
        ({"TOY_RANK": "1"}, "started by toy, but TOY_RANKS is not set"),
        ({"TOY_RANK": "3", "TOY_RANKS": "3"}, "toy says rank 3 of 3, 3 of 3 here"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == [["environment", "mpi", "slurm", "torchrun", "toy"], expected]
