"""One recipe under real starters: the weights are the same bits under all of them, and a Slurm job that is asked to save
in the middle of a step goes on as if nobody had asked."""

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.submit import real
from unisono.train.state.checkpoint import latest, read_full, verify_folder

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RECIPE = """\
name = "same"
seed = 3
plan = "dp=2 sync=canonical"
[model]
n_layer = 2
n_head = 2
d_model = 32
context = 32
[data]
source = "stdlib"
[train]
steps = {steps}
global_batch = 8
micro_batch = 1
eval_every = 0
[launch]
threads_per_rank = 1
backend = "gloo"
timeout = 120.0
[out]
report = false
[job]
{more}
"""
TRAIN = (sys.executable, "-m", "unisono", "train", "recipe.toml")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", *TRAIN)
MPICH = ("mpirun.mpich", "-n", "2", *TRAIN)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    *TRAIN[2:],
)


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "NO_COLOR": "1", **more}


def written(folder: Path, steps: int = 12, more: str = "") -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, more=more))


def ran(folder: Path, words: Sequence[str], known: Mapping[str, str]) -> str:
    done = subprocess.run(
        words, cwd=folder, env=dict(known), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def sha(folder: Path, name: str = "same") -> str:
    """Of the tensors of the newest checkpoint of the folder's only run."""
    (run,) = (path for path in (folder / "runs" / name).iterdir() if path.is_dir())
    checkpoint = latest(run)
    assert checkpoint is not None
    verify_folder(checkpoint)
    digest = hashlib.sha256()
    for tensor, value in sorted(read_full(checkpoint).items()):
        digest.update(tensor.encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run on one device."""
    folder = tmp_path_factory.mktemp("one")
    written(folder)
    ran(folder, [*TRAIN, "--plan", "dp=1 sync=canonical"], environ())
    return sha(folder)


@pytest.mark.parametrize("words", [TORCHRUN, OPEN_MPI, MPICH], ids=["torchrun", "Open MPI", "MPICH"])
def test_torchrun_and_both_mpis_compute_what_one_device_computes(
    tmp_path: Path, words: Sequence[str], reference: str
) -> None:
    real.needed(words[0])
    written(tmp_path)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(real.free_ports(1)[0])}
    ran(tmp_path, words, environ(**(meet if "mpirun" in words[0] else {})))
    assert sha(tmp_path) == reference


def test_a_cluster_of_ray_computes_what_one_device_computes(tmp_path: Path, reference: str) -> None:
    pytest.importorskip("ray", reason='pip install "unisono[ray]"')
    written(tmp_path)
    script = ran(
        tmp_path, [sys.executable, "-m", "unisono", "launch", "ray", "recipe.toml", "--dry-run"], environ()
    )
    (tmp_path / "job.sh").write_text(script)
    ran(tmp_path, ["bash", "job.sh"], environ())
    assert sha(tmp_path) == reference


def test_ssh_to_this_host_computes_what_one_device_computes(tmp_path: Path, reference: str) -> None:
    (tmp_path / "keys").mkdir()
    with real.sshd(tmp_path / "keys") as shell:
        written(tmp_path, more='hosts = "localhost:1,127.0.0.1:1"\n[network]\ninterface = "lo"')
        words = [sys.executable, "-m", "unisono", "launch", "ssh", "recipe.toml", "--launch.shell", shell]
        ran(tmp_path, words, environ())
        real.until(lambda: (tmp_path / "jobs/same-ssh/job.exit").exists(), 240.0)
        log = (tmp_path / "jobs/same-ssh/job.log").read_text()
        assert "done" in ran(tmp_path, [*words, "--state"], environ()), log[-3000:]
    assert sha(tmp_path) == reference


def test_slurm_of_one_node_and_of_four_computes_what_one_device_computes(
    tmp_path: Path, reference: str
) -> None:
    """srun by hand on one node, then a batch job of one rank on each of four."""
    with real.slurm(4) as known:
        one, four = tmp_path / "one", tmp_path / "four"
        for folder in (one, four):
            folder.mkdir()
        meet = {**environ(), **known, "MASTER_ADDR": "127.0.0.1"}
        written(one)
        ran(one, ["srun", "-N1", "-n2", *TRAIN], meet)
        assert sha(one) == reference
        written(four, more='nodes = 4\nenv = ["MASTER_ADDR=127.0.0.1"]\n')
        launch = [
            sys.executable,
            "-m",
            "unisono",
            "launch",
            "slurm",
            "recipe.toml",
            "--plan",
            "dp=4 sync=canonical",
        ]
        ran(four, launch, meet)
        real.until(lambda: state(four, launch, meet) in ("done", "unknown"), 240.0)
        assert sha(four) == reference, logs(four)


def state(folder: Path, launch: Sequence[str], known: Mapping[str, str]) -> str:
    return ran(folder, [*launch, "--state"], known).split()[-1]


def logs(folder: Path) -> str:
    return "\n".join(file.read_text()[-3000:] for file in folder.glob("*.out"))


@pytest.mark.parametrize("sent", ["USR1@60", "B:USR1@60"])
def test_a_job_that_saves_in_mid_step_is_requeued_and_goes_on_exactly(tmp_path: Path, sent: str) -> None:
    steps = 300
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    written(whole, steps)
    ran(whole, [*TRAIN, "--plan", "dp=1 sync=canonical"], environ())
    with real.slurm(1) as known:
        meet = {**environ(), **known}
        written(cut, steps, f'env = ["MASTER_ADDR=127.0.0.1"]\n[slurm]\nsignal = "{sent}"')
        launch = [sys.executable, "-m", "unisono", "launch", "slurm", "recipe.toml"]
        ran(cut, launch, meet)
        metrics = "runs/same/*/metrics.jsonl"
        real.until(lambda: any(file.read_text().count("\n") > 40 for file in cut.glob(metrics)), 120.0)
        number = ran(cut, ["squeue", "-h", "-o", "%A"], meet).split()[0]
        batch = ["--batch"] if sent.startswith("B") else []
        ran(cut, ["scancel", "--signal=USR1", *batch, number], meet)  # as Slurm does before a limit
        real.until(lambda: "PENDING" in real.said(["squeue", "-h", "-o", "%T"], meet), 120.0)
        assert "error U-S01" in logs(cut)
        # A requeued job waits for two minutes: Slurm wants its nodes to have come back.
        ran(cut, ["scontrol", "update", f"JobId={number}", "StartTime=now"], meet)
        real.until(lambda: state(cut, launch, meet) in ("done", "unknown"), 300.0)
        said = logs(cut)
    assert "Slurm has started this job again once" in said and sha(cut) == sha(whole), said


ALONE = """\
import subprocess, sys
from tests.submit import real
with real.slurm(1) as known:
    subprocess.run(["sbatch", "-o", "/dev/null", "--wrap", "touch began; exec sleep 600"], env=known, check=True,
                   stdout=subprocess.DEVNULL)
    print(known["SLURM_CONF"], flush=True)
    sys.stdin.read()
"""


def test_a_test_that_is_killed_leaves_no_daemon_and_no_job_behind(tmp_path: Path) -> None:
    real.needed(*real.SLURM)
    words = [sys.executable, "-c", ALONE]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout
        mark = f"SLURM_CONF={test.stdout.readline().strip()}".encode()
        real.until((tmp_path / "began").exists)
        test.kill()

    def left() -> list[str]:
        """Processes that have the variable of this Slurm: its daemons, and its jobs."""
        seen = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                seen += [path.parent.name] * (mark in path.read_bytes())
        return seen

    real.until(lambda: not left(), 40.0)
    assert not Path(mark.decode().partition("=")[2]).parent.exists()
