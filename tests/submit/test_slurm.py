"""`unisono launch slurm`: the script as text, and as bash runs it beside commands that play Slurm's."""

import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from tests.submit.jobs import RECIPE, commands, job
from unisono.cli import main
from unisono.config import load
from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.submit import SUBMITTERS, JobState
from unisono_contrib.submit.job import job_of
from unisono_contrib.submit.schedulers.slurm import SlurmSubmitter

pytestmark = pytest.mark.timeout(60)
SAVES = 'trap "exit 75" USR1; touch begun; while :; do sleep 0.02; done'


def script(folder: Path, more: str = "", plan: str = "dp=2 tp=2") -> str:
    return SlurmSubmitter().files(job(folder, plan, more))[0].text


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def played(folder: Path, text: str, *, send: int | None = None, **environ: str) -> tuple[int, list[str]]:
    """(exit code, calls of commands) of the script in a job of number 7. send: a signal to the batch script alone."""
    (folder / "job.sbatch").write_text(text)
    known = {**os.environ, "PATH": f"{folder}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", **environ}
    # Who runs tests under nohup ignores SIGHUP, which a shell could not trap then.
    words = ["env", "--default-signal", "/bin/bash", "job.sbatch"]
    process = subprocess.Popen(words, cwd=folder, env=known, stderr=subprocess.PIPE, start_new_session=True)
    try:
        if send is not None:
            while not (folder / "begun").exists():
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(send)
        process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, (folder / "calls").read_text().splitlines()


def test_a_job_asks_for_what_the_plan_takes(tmp_path: Path) -> None:
    more = '[job]\nnodes = 2\ntime = "04:00:00"\n[launch]\nbackend = "nccl"\nthreads_per_rank = 3\n'
    needed = directives(script(tmp_path, more))
    of_node = job(tmp_path, more=more).need
    assert needed["nodes"] == "2" and needed["ntasks-per-node"] == "2" and needed["cpus-per-task"] == "3"
    assert (
        needed["mem"] == f"{of_node.mib}M" and needed["gpus-per-node"] == "2" and needed["time"] == "04:00:00"
    )
    assert job(tmp_path, "dp=4 tp=2", more).need.mib > of_node.mib, "four ranks of a node take more than two"


def test_the_script_carries_the_recipe_as_it_was_resolved(tmp_path: Path) -> None:
    made = commands(tmp_path, srun='cp "${@: -5:1}" seen.toml')
    code, calls = played(tmp_path, script(tmp_path))
    assert code == 0 and made.is_dir() and "-m unisono train runs/jobs/small-7.toml --resume auto" in calls[0]
    loaded = load(tmp_path / "seen.toml")
    assert loaded.recipe.train.steps == 8 and str(loaded.plan) == "dp=2 micros=4 tp=2"
    assert loaded.recipe.launch.threads_per_rank == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_script_reaches_the_ranks_and_the_saved_job_is_requeued(
    tmp_path: Path, number: int
) -> None:
    commands(tmp_path, srun=SAVES, scontrol="")
    code, calls = played(tmp_path, script(tmp_path, '[slurm]\nsignal = "B:USR1@60"'), send=number)
    assert code == 75 and calls[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("leaves", "restart", "requeued"), [(75, "0", True), (75, "6", False), (2, "0", False), (0, "0", False)]
)
def test_only_what_has_saved_is_requeued_and_not_for_ever(
    tmp_path: Path, leaves: int, restart: str, requeued: bool
) -> None:
    commands(tmp_path, srun=f"exit {leaves}", scontrol="")
    code, calls = played(tmp_path, script(tmp_path), SLURM_RESTART_COUNT=restart)
    assert code == leaves and (calls[-1] == "scontrol requeue 7") is requeued


def test_any_signal_of_a_site_is_passed_on_as_one_that_ranks_know(tmp_path: Path) -> None:
    commands(tmp_path, srun=SAVES)
    more = '[slurm]\nsignal = "B:HUP@90"\nrequeue = "none"\n[launch]\ngrace = 300.0\n'
    text = script(tmp_path, more)
    assert directives(text)["signal"] == "B:HUP@90" and "--launch.grace 67.5" in text
    assert played(tmp_path, text, send=signal.SIGHUP)[0] == 75
    with pytest.raises(ConfigProblems, match="do not save on SIGHUP"):
        script(tmp_path, '[slurm]\nsignal = "HUP@90"')


def test_a_chain_needs_no_command_on_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_ = commands(tmp_path, sbatch='echo "$(wc -l < calls);cluster"')
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    chained = job(tmp_path, more='[job]\nrestarts = 2\n[slurm]\nrequeue = "chain"')
    assert "scontrol" not in SlurmSubmitter().files(chained)[0].text
    assert SlurmSubmitter().submit(chained, tmp_path) == "1 2 3"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--dependency=afternotok:2 --kill-on-invalid-dep=yes" in calls[2] and "afternotok" not in calls[0]


def test_an_array_has_a_recipe_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(RECIPE.format(plan="dp=2", more="[slurm]\nat_once = 2"))
    each = ("--each", "seed=0,1", "--each", "train.lr=0.1,0.2")
    assert main(["launch", "slurm", "small.toml", "--dry-run", *each]) == 0
    text = capsys.readouterr().out
    assert directives(text)["array"] == "0-3%2" and directives(text)["output"] == "small-%A_%a.out"
    commands(tmp_path, srun='cp "${@: -5:1}" seen.toml')
    assert played(tmp_path, text, SLURM_ARRAY_TASK_ID="2")[0] == 0
    seen = tomllib.loads((tmp_path / "seen.toml").read_text())
    assert (seen["name"], seen["seed"], seen["train"]["lr"]) == ("small-2", 1, 0.1)


def test_a_list_of_nodes_has_enough(tmp_path: Path) -> None:
    assert directives(script(tmp_path, '[slurm]\nnodelist = "node[01-04]"'))["nodelist"] == "node[01-04]"
    with pytest.raises(UsageError, match="names 1 nodes, and the job takes 2"):
        script(tmp_path, '[job]\nnodes = 2\n[slurm]\nnodelist = "node[04-04]"')
    with pytest.raises(ConfigProblems, match="no list of nodes"):
        script(tmp_path, '[slurm]\nnodelist = "node[04-01]"')


def test_ranks_that_nodes_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4 ranks, and 3 nodes of 1 ranks have 3"):
        job(tmp_path, more="[job]\nnodes = 3")
    assert job(tmp_path, "dp=-1 tp=2", "[job]\nnodes = 2\nranks_per_node = 4").world == 8
    with pytest.raises(UsageError, match="no ledger of memory"):
        text = RECIPE.format(plan="dp=2", more="").split("[model]")[0] + '[model]\nkind = "mlp"\n'
        file = tmp_path / "mlp.toml"
        file.write_text(text + '[data]\nsource = "digits"\n[train]\nglobal_batch = 8\nmicro_batch = 1')
        job_of([load(file)], "mlp")


@pytest.mark.parametrize(
    ("queue", "account", "state"),
    [
        ("RUNNING", "", "running"), ("PENDING\nRUNNING", "", "running"), ("", "COMPLETED", "done"),
        ("", "CANCELLED by 0", "stopped"), ("", "TIMEOUT", "failed"), ("", "", "unknown"),
    ],
)  # fmt: skip
def test_the_state_is_what_queue_or_accounts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, account: str, state: str
) -> None:
    bin_ = commands(tmp_path, squeue=f'printf "{queue}"', sacct=f'printf "{account}"')
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    assert SlurmSubmitter().state("7", tmp_path) is JobState(state)


def test_without_sbatch_nothing_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    Path("small.toml").write_text(RECIPE.format(plan="dp=2", more=""))
    assert main(["launch", "slurm", "small.toml"]) == 2
    said = capsys.readouterr().err
    assert (
        "error U-L14  sbatch:" in said
        and "--dry-run" in said
        and not Path("jobs/small-slurm/job.json").exists()
    )
    assert "slurm" in SUBMITTERS.names()
