"""`unisono launch ray`: the script, and its driver on a cluster of this machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.submit.jobs import commands, job
from unisono_contrib.launch.on_ray import Seat, places
from unisono_contrib.submit import JobState
from unisono_contrib.submit.schedulers.ray import RaySubmitter

pytestmark = pytest.mark.timeout(240)
RANK = """\
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
rank, how = int(os.environ["RANK"]), sys.argv[1]
began = pathlib.Path(f"began{rank}")
first = not began.exists()
began.write_text(json.dumps({name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "NOTE")}))
if how == "killed" and first and rank == 1:
    os.kill(os.getppid(), signal.SIGKILL)  # the actor: as if its host were lost
if how == "saves" and first:
    sys.exit(75)
if how == "wrong":
    sys.exit(2)
while how == "waits":
    time.sleep(0.02)
"""


def driver(folder: Path, how: str, *flags: str) -> "subprocess.Popen[str]":
    (folder / "rank_play.py").write_text(RANK)
    words = ["--ranks", "2", "--patience", "5", "--env", "NOTE=here", *flags, "--", "rank_play", how]
    return subprocess.Popen(
        [sys.executable, "-m", "unisono_contrib.launch.on_ray", *words],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def seat(host: str, *gpus: str) -> Seat:
    return Seat(host, f"10.0.0.{host}", 5000 + int(host), gpus)


def test_ranks_of_a_host_follow_each_other_and_share_its_gpus() -> None:
    made = places([seat("1", "3"), seat("2", "0"), seat("1", "5")])
    assert [actor for actor, _ in made] == [0, 2, 1]
    assert [known["LOCAL_RANK"] for _, known in made] == ["0", "1", "0"]
    assert [known["CUDA_VISIBLE_DEVICES"] for _, known in made] == ["3,5", "3,5", "0"]
    assert {(known["MASTER_ADDR"], known["MASTER_PORT"], known["WORLD_SIZE"]) for _, known in made} == {
        ("10.0.0.1", "5001", "3")
    }


def test_the_script_asks_for_the_ledger_and_passes_variables_on(tmp_path: Path) -> None:
    made = job(
        tmp_path, more='[launch]\nthreads_per_rank = 2\n[network]\ninterface = "ib0"\n[job]\nnodes = 2'
    )
    text = RaySubmitter().files(made)[0].text
    assert f"--ranks 4 --cpus 2 --gpus 0 --mib {-(-made.need.mib // 2)}" in text
    assert "--env NCCL_SOCKET_IFNAME=ib0" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_state_and_submission_go_through_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "[ $2 = submit ] && echo \"Job 'raysubmit_7' submitted\" || echo \"Status for job 'raysubmit_7': RUNNING\""
    monkeypatch.setenv("PATH", f"{commands(tmp_path, ray=body)}:/usr/bin:/bin")
    number = RaySubmitter().submit(job(tmp_path), tmp_path)
    assert number == "raysubmit_7" and RaySubmitter().state(number, tmp_path) is JobState.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("killed", 0), ("saves", 0), ("wrong", 2), ("done", 0)])
def test_what_is_lost_or_has_saved_is_placed_again(tmp_path: Path, how: str, code: int) -> None:
    pytest.importorskip("ray", reason='pip install "unisono[ray]"')
    process = driver(tmp_path, how)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
    assert ("note  start 1 of 7 has ended" in said) is (how in ("killed", "saves"))
    seen = [json.loads((tmp_path / f"began{rank}").read_text()) for rank in range(2)]
    assert [(one["WORLD_SIZE"], one["LOCAL_RANK"], one["NOTE"]) for one in seen] == [
        ("2", "0", "here"),
        ("2", "1", "here"),
    ]


@pytest.mark.slow
def test_who_asks_the_driver_to_stop_has_the_ranks_save(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='pip install "unisono[ray]"')
    process = driver(tmp_path, "waits")
    while not all((tmp_path / f"began{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 75
