"""Schedulers for real, on this machine, in a temporary folder: Slurm with four nodes, and ssh to this host."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_CONF = """\
ClusterName=unisono
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={place}/munge.socket
StateSaveLocation={place}/state
SlurmctldPidFile={place}/ctld.pid
SlurmctldLogFile={place}/ctld.log
SlurmdSpoolDir={place}/spool.%n
SlurmdPidFile={place}/%n.pid
SlurmdLogFile={place}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
ReturnToService=2
MpiDefault=none
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def needed(*programs: str) -> None:
    """Skip the test, and say so, without one of these programs, or where who tests is not root."""
    path = f"{os.environ['PATH']}:{_SBIN}"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing or os.geteuid():
        pytest.skip(f"SKIPPED: takes {' '.join(missing) or 'root'} (apt install slurm-wlm munge openssh-server mpich"
                    " openmpi-bin)")  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: daemons take numbers alone, and all are kept until all are known."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Look until it is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@contextlib.contextmanager
def slurm(nodes: int, cores: int = 2) -> Iterator[dict[str, str]]:
    """A Slurm with so many nodes, all on this host; its variables. What it started ends with it."""
    needed(*SLURM)
    place = Path(tempfile.mkdtemp(prefix="slurm"))  # the path of a socket is short
    place.chmod(0o755)
    environ = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{_SBIN}"}
    ports, names = free_ports(nodes + 1), [f"node{number:02}" for number in range(1, nodes + 1)]
    host = socket.gethostname().partition(".")[0]
    rows = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=4000"
        for name, port in zip(names, ports[1:], strict=True)
    )
    (place / "slurm.conf").write_text(_CONF.format(host=host, ports=ports, place=place, nodes=rows))
    (place / "munge.key").write_bytes(os.urandom(128))
    (place / "munge.key").chmod(0o400)
    munged = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log",
              "seed-file": "seed"}  # fmt: skip
    daemons = [
        ["munged", "--force", *(f"--{flag}={place / name}" for flag, name in munged.items())],
        ["slurmctld"],
    ]
    daemons += [["slurmd", "-N", name] for name in names]
    for folder in ("state", *(f"spool.{name}" for name in names)):
        (place / folder).mkdir()
    with kept(place, daemons, environ):
        until(lambda: said(["sinfo", "-h", "-t", "idle", "-o", "%D"], environ) == str(nodes))
        yield environ


@contextlib.contextmanager
def kept(place: Path, daemons: Sequence[Sequence[str]], environ: dict[str, str]) -> Iterator[None]:
    """Daemons that end with all that they started, and with their folder, when the block ends or this process does, in
    whatever way."""
    words = [sys.executable, "-m", "tests.submit.keeper", str(place), json.dumps(daemons)]
    with tempfile.TemporaryFile("w+") as log:
        keeper = subprocess.Popen(
            words, env=environ, cwd=ROOT, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        assert keeper.stdin and keeper.stdout
        try:
            up = keeper.stdout.readline()
            log.seek(0)
            assert up == "up\n", log.read()
            yield
        finally:
            keeper.stdin.close()
            keeper.wait(timeout=60)
            keeper.stdout.close()


def said(words: Sequence[str], environ: dict[str, str]) -> str:
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[str]:
    """A server of ssh on this host with keys of its own; the command that reaches it."""
    needed("sshd", "ssh", "ssh-keygen")
    folder.chmod(0o700)
    for name in ("host", "user"):
        key = str(folder / name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_ports(1)[0]
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "authorized", "ListenAddress": f"127.0.0.1:{port}",
        "PidFile": "none", "UsePAM": "no", "StrictModes": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:{_SBIN}")
    words = [f"-o{name}={value}" for name, value in options.items()]
    place = Path(tempfile.mkdtemp(prefix="sshd"))
    with kept(
        place, [[str(sshd), "-E", str(folder / "sshd.log"), "-f", "/dev/null", *words]], dict(os.environ)
    ):
        with_key = f"ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -i {folder / 'user'}"
        shell = f"{with_key} -o LogLevel=ERROR -p {port}"
        until(lambda: said([*shell.split(), "127.0.0.1", "echo here"], dict(os.environ)) == "here", 30.0)
        yield shell
