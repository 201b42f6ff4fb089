"""The real thing: hosts, links, and that nothing of them stays. Needs root, ip and tc."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from unisono_contrib.lab import links, play
from unisono_contrib.lab.links import LabLink
from unisono_contrib.lab.network import LabNetwork
from unisono_contrib.lab.play import Play
from unisono_contrib.lab.spaces import inside

SOURCE = str(Path(links.__file__).parents[2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("tc")), reason="no ip and tc (iproute2) here"
    ),
]


def connected(network: LabNetwork, one: int, other: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection between two hosts."""
    with inside(network.hosts[other]):
        door = socket.create_server((links.address(other), 0))
    with inside(network.hosts[one]):
        near = socket.create_connection(door.getsockname(), timeout=20)
    far, _ = door.accept()
    door.close()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(20)
    return near, far


def networks() -> set[str]:
    """Of all processes of this machine."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            found.add(os.readlink(entry / "ns/net"))
    return found


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("delay", [0.0, 0.004])
def test_bytes_cross_the_links_and_are_counted(hosts: int, delay: float) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with LabNetwork(hosts, LabLink(1e9, delay)) as network:
        before = network.traffic()
        near, far = connected(network, 0, hosts - 1)
        sent = os.urandom(200_000)
        near.sendall(sent)
        got = b""
        while len(got) < len(sent):
            got += far.recv(1 << 16)
        assert got == sent
        after = [now.since(old) for now, old in zip(network.traffic(), before, strict=True)]
        near.close()
        far.close()
    crossed = len(sent) if hosts > 1 else 0
    assert after[0].sent >= crossed
    assert after[-1].received >= crossed
    assert sum(one.sent for one in after) <= 1.2 * crossed + 5000
    assert os.readlink("/proc/thread-self/ns/net") == home, "this thread is back in its own network"


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_delay_is_one_way_between_any_two_hosts(hosts: int) -> None:
    delay = 0.03
    with LabNetwork(hosts, LabLink(0.0, delay)) as network:
        near, far = connected(network, 0, hosts - 1)
        took = []
        for _ in range(5):
            begun = time.monotonic()
            near.sendall(b"x")
            far.recv(1)
            far.sendall(b"y")
            near.recv(1)
            took.append(time.monotonic() - begun)
        near.close()
        far.close()
    assert min(took) >= 2 * delay
    assert min(took) < 20 * delay, "held once a way, not for ever"


def test_a_rate_is_kept() -> None:
    """Two megabytes at 20 Mbit/s take 0.8 s, but for what a bucket and the queues hold; never much less."""
    size = 2_000_000
    with LabNetwork(2, LabLink(20e6)) as network:
        near, far = connected(network, 0, 1)
        begun, got = time.monotonic(), 0
        if not (child := os.fork()):
            near.sendall(bytes(size))
            os._exit(0)
        while got < size:
            got += len(far.recv(1 << 16))
        took = time.monotonic() - begun
        os.waitpid(child, 0)
        near.close()
        far.close()
    assert took >= 0.9 * 8 * size / 20e6


def played(words: list[str], counts: tuple[int, ...] = (1, 1), starter: str = "environment") -> int:
    with LabNetwork(len(counts), LabLink(1e9)) as network, Play(network) as lab:
        given = play.commands(words, counts, dict(os.environ), starter, 2)
        return lab.run(given, "/")


def test_a_host_is_a_machine_of_its_own(tmp_path: Path) -> None:
    said = f'(hostname; echo $$; ls /sys/class/net; ls -d /proc/[0-9]* | wc -l) > {tmp_path}/"$RANK"'
    assert played(["sh", "-c", said], (2, 1)) == 0
    for rank, host in enumerate(("host0", "host0", "host1")):
        name, number, *devices, processes = (tmp_path / str(rank)).read_text().split()
        assert name == host
        assert int(number) < 50, "numbers of processes begin anew"
        assert sorted(devices) == ["lab0", "lo"]
        assert int(processes) < 20, "others of this machine are not in sight"


def test_the_exit_code_is_that_of_the_first_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GRACE", 0.0)
    assert played(["true"]) == 0
    assert played(["sh", "-c", "exit 7"]) == 7
    assert played(["sh", "-c", "kill -9 $$"]) == 137
    assert played(["no-such-command-here"]) == 127
    assert played(["sh", "-c", 'test "$RANK" = 1 && exit 5; exec sleep 1000']) == 5


def test_who_leaves_something_behind_leaves_nothing(tmp_path: Path) -> None:
    before = networks()
    assert played(["sh", "-c", f"setsid sleep 1000 & mkfifo {tmp_path}/$RANK; exit 0"]) == 0
    assert networks() <= before


class Lab:
    """`unisono lab` in a process of its own. mark: stands in the environment of all that it starts."""

    def __init__(self, *flags: str) -> None:
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, "PYTHONPATH": SOURCE, "LAB_MARK": self.mark}
        script = "trap 'exit 33' INT; setsid sleep 1000 & echo up; while :; do sleep 0.05; done"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "lab", *flags, "--", "sh", "-c", script],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        for _ in range(2):
            assert self.process.stdout.readline() == "up\n"
        self.pids = self._marked()

    def _marked(self) -> list[int]:
        """By their pidfds."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(os.pidfd_open(int(entry.name)))
        return found

    def all_end(self) -> bool:
        """Whether all of them are gone, or go within half a minute."""
        until = time.monotonic() + 30
        for pidfd in self.pids:
            if not select.select([pidfd], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
        return not self._marked()


@pytest.fixture(params=[(), ("--delay", "2ms")], ids=["no delay", "delay"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    made = Lab("--hosts", "2", *request.param)
    yield made
    made.process.kill()
    made.process.wait()
    for pidfd in made.pids:
        os.close(pidfd)


def test_ctrl_c_reaches_the_command_and_nothing_stays(lab: Lab) -> None:
    assert len(lab.pids) >= 1 + 2 * 2 + 2 * 2
    lab.process.send_signal(signal.SIGINT)
    assert lab.process.wait(60) == 33, "the command's own code"
    assert lab.all_end()


def test_kill_9_leaves_nothing(lab: Lab) -> None:
    lab.process.kill()
    lab.process.wait()
    assert lab.all_end()


def test_a_second_signal_ends_what_does_not_listen(lab: Lab) -> None:
    lab.process.send_signal(signal.SIGHUP)
    lab.process.send_signal(signal.SIGTERM)
    assert lab.process.wait(60) in (129, 143)
    assert lab.all_end()
