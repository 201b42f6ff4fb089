"""Who started us: every starter's variables, whole sets only."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.ports import kept_port
from unisono.launch import env
from unisono.launch.starters import STARTERS, slurm
from unisono.spec.errors import UsageError

ROOT = Path(__file__).parents[2]

PLAIN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29511",
}
TORCHRUN = {
    **PLAIN,
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_ERROR_FILE": "/tmp/e.json",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "100",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (PLAIN, ("environment", 1, 4, 1, 2, "h", 29511)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ("environment", 1, 2, 1, 2, "localhost", 1),
        ),
        (TORCHRUN, ("torchrun", 1, 4, 1, 2, "h", 29511)),
        ({**TORCHRUN, **SLURM}, ("torchrun", 1, 4, 1, 2, "h", 29511)),
        (SLURM, ("Slurm", 5, 7, 1, 3, "gpu07", 16484)),
        ({**SLURM, "MASTER_PORT": "77"}, ("Slurm", 5, 7, 1, 3, "gpu07", 77)),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, "127.0.0.1", 29500)),
        (PMI, ("PMI", 0, 2, 0, 2, "127.0.0.1", 29500)),
    ],
)
def test_each_starter_is_understood(environ: dict[str, str], expected: tuple) -> None:
    place = env.detect(environ)
    assert place is not None
    assert (
        place.source, place.rank, place.world, place.local_rank, place.local_world, place.master, place.port
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [{}, {"MASTER_ADDR": "h"}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}],
)
def test_nobody_started_us(environ: dict[str, str]) -> None:
    assert env.detect(environ) is None


def test_a_job_without_its_launcher_is_told() -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    (said,) = env.idle(inside)
    assert "not under srun" in said and "SLURM_NTASKS=8" in said
    assert env.idle({"SLURM_PROCID": "0"}) and not env.idle({**inside, **SLURM})
    assert not env.idle({}) and not env.idle({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"})


@pytest.mark.parametrize(
    ("starter", "name"),
    [
        *((PLAIN, name) for name in PLAIN),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE"),
        (SLURM, "SLURM_NODEID"),
        (SLURM, "SLURM_NTASKS"),
        (SLURM, "SLURM_PROCID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_a_partial_set_says_what_is_missing(starter: dict[str, str], name: str) -> None:
    """Guessed, ranks of one host would count different cores and choose different backends."""
    with pytest.raises(UsageError, match=f"{name.replace('_STEP', '')} (is|are) not set") as caught:
        env.detect({key: value for key, value in starter.items() if key != name})
    assert caught.value.exit == 2 and caught.value.code == "L02"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**PLAIN, "RANK": "one"}, "RANK is 'one'"),
        ({**PLAIN, "RANK": "4"}, "rank 4 of 4"),
        ({**PLAIN, **SLURM}, "Slurm says 5 of 7"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID"),
    ],
)
def test_nonsense_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        env.detect(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("gpu[07-09,12],x", "gpu07"), ("a1,b2", "a1"), ("", ""), ("rack-[1,3]", "rack-1")],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


def test_starters_are_a_family() -> None:
    """Each has its turn, so that the order in which they are asked is one; none knows an empty environment."""
    starters = [STARTERS.find(name)() for name in STARTERS.names()]
    assert (
        [starter.name for starter in starters]
        == list(STARTERS.names())
        == ["dstack", "environment", "mpi", "skypilot", "slurm", "tf_config", "torchrun"]
    )
    assert len({starter.turn for starter in starters}) == len(starters)
    assert all(starter.detect({}) is None and starter.summary() for starter in starters)


def clean_environ(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.slow  # tests/verbs/test_by_others.py trains under torchrun each time
@pytest.mark.timeout(90)
def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + ["-m", "tests.launch.in_env", "add"],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 1]
    assert all(line["sum"] == 3.0 and line["exit"] == 0 for line in lines)


def by_hand(what: str, folder: Path) -> list[tuple[int, dict]]:
    """Of two ranks with plain variables: exit code, and what they said. Each has a folder for torchrun's error file."""
    with kept_port() as port:
        ranks = [
            Forked(
                ["-m", "tests.launch.in_env", what],
                ROOT,
                clean_environ(
                    RANK=str(rank),
                    WORLD_SIZE="2",
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    TORCHELASTIC_ERROR_FILE=str(folder / f"{rank}" / "error.json"),
                ),
            )
            for rank in range(2)
        ]
        said = [json.loads(rank.stdout.read().splitlines()[-1]) for rank in ranks]
        return [(rank.wait(), one) for rank, one in zip(ranks, said, strict=True)]


@pytest.mark.timeout(90)
def test_plain_variables_and_a_rank_that_raises(tmp_path: Path) -> None:
    (other, echo), (code, own) = by_hand("raise", tmp_path)
    assert (other, code) == (1, 1)
    assert own["error"]["what"] == "ValueError: no more" and "in_env.py" in own["error"]["where"]
    assert own["error"]["likely"] == "rank 0 was stopped because of it" and not own["shared"]
    assert echo["error"]["likely"].startswith("another process")
    told = json.loads((tmp_path / "1" / "error.json").read_text())
    assert told["message"]["message"] == "ValueError: no more"
    assert "in_env.py" in told["message"]["extraInfo"]["py_callstack"], (
        "the place: torchrun prints it in its table"
    )


@pytest.mark.timeout(90)
def test_what_all_ranks_raise_is_for_one_of_them_to_tell(tmp_path: Path) -> None:
    for rank, (code, said) in enumerate(by_hand("all", tmp_path)):
        assert code == 1 and said["shared"] and said["error"]["rank"] == 0
        assert said["error"]["likely"].startswith("every rank raised it")
        told = json.loads((tmp_path / f"{rank}" / "error.json").read_text())
        assert told["message"]["message"] == "ValueError: no more", "torchrun's table has each"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "starter", [{}, {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "False"}]
)
def test_a_port_in_use_is_one_clear_error(starter: dict[str, str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        environ = clean_environ(
            RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **starter
        )
        rank = Forked(["-m", "tests.launch.in_env", "add"], ROOT, environ)
        said = json.loads(rank.stdout.read().splitlines()[-1])
    assert rank.wait() == 2 and said["error"]["code"] == "U-L01"
    assert f"port {port} is in use" in said["error"]["what"]
    assert "Traceback" not in rank.stderr.read()
