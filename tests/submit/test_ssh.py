"""`unisono launch ssh`: a script on the first host, which is asked about by the files that it leaves."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.submit.jobs import job
from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.submit import JobState
from unisono_contrib.submit.job import JobRequest
from unisono_contrib.submit.schedulers.ssh import SshSubmitter

pytestmark = pytest.mark.timeout(60)


def ssh_job(folder: Path, hosts: str, more: str = "", body: str = "exit 0", plan: str = "dp=4") -> JobRequest:
    """A job whose interpreter is a script with this body."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >> "{folder}/calls"\n{body}\n')
    python.chmod(0o755)
    return job(folder, plan, f'[job]\nhosts = "{hosts}"\npython = "{python}"\n{more}')


def submitted(folder: Path, made: JobRequest) -> str:
    for file in SshSubmitter().files(made):
        (folder / file.name).write_text(file.text)
    return SshSubmitter().submit(made, folder)


def ended(folder: Path, number: str) -> JobState:
    while (state := SshSubmitter().state(number, folder)) is JobState.RUNNING:
        time.sleep(0.02)
    return state


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (75, "stopped"), (1, "failed")])
def test_a_job_on_this_host_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    monkeypatch.chdir(tmp_path)
    number = submitted(tmp_path, ssh_job(tmp_path, "localhost:2,other:2", body=f"exit {code}"))
    assert ended(tmp_path, number) is JobState(state)
    words = (tmp_path / "calls").read_text()
    assert "train runs/jobs/small-ssh.toml --resume auto" in words and "--hosts localhost:2,other:2" in words


def test_a_signal_to_the_job_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = f'trap "exit 75" USR1; touch "{tmp_path}/begun"; while :; do sleep 0.02; done'
    number = submitted(tmp_path, ssh_job(tmp_path, "localhost:4", body=body))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert SshSubmitter().state(number, tmp_path) is JobState.RUNNING
    os.kill(int(number), signal.SIGTERM)
    assert ended(tmp_path, number) is JobState.STOPPED


def test_another_host_leads_by_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\necho "$1" >> asked\nshift\nexec bash -c "$*"\n')
    shell.chmod(0o755)
    made = ssh_job(tmp_path, "nowhere.example[1-2]:2", f'[launch]\nshell = "{shell}"')
    number = submitted(tmp_path, made)
    assert number.split()[:2] == [str(shell), "nowhere.example1"]
    assert ended(tmp_path, number) is JobState.DONE
    assert set((tmp_path / "asked").read_text().split()) == {"nowhere.example1"}
    assert "--hosts nowhere.example1:2,nowhere.example2:2" in (tmp_path / "calls").read_text()


def test_other_hosts_get_variables_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = 'setup = ["export MODULE=loaded"]\nenv = ["A=it is"]\n[network]\ninterface = "ib0"\n[launch]\nshell = "bash fake"'
    (tmp_path / "fake").write_text('shift\nexec bash -c "$*"\n')
    made = ssh_job(tmp_path, "localhost:2,b:2", more)
    number = submitted(tmp_path, made)
    assert ended(tmp_path, number) is JobState.DONE
    assert f"--launch.shell bash {tmp_path}/remote.sh" in (tmp_path / "calls").read_text()
    seen = subprocess.run(
        ["bash", "remote.sh", "b", "cd / && exec env"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"MODULE=loaded", "A=it is", "GLOO_SOCKET_IFNAME=ib0"} <= set(seen)


def test_hosts_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    assert ssh_job(tmp_path, "a:2,b:6", plan="dp=-1").world == 8
    assert ssh_job(tmp_path, "node[01-04]", "ranks_per_node = 2", plan="dp=-1").world == 8
    assert ssh_job(tmp_path, "node[01-04]", plan="dp=4").nodes == 4
    with pytest.raises(ConfigProblems, match="no list of hosts"):
        ssh_job(tmp_path, "node[04-01]")
    with pytest.raises(UsageError, match="nobody says which hosts"):
        SshSubmitter().files(job(tmp_path))
