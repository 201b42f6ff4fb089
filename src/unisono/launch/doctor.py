"""`unisono doctor`: is this machine fit to train on, and if not, what is to be done? No torch on this side."""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from unisono.launch.backend import Equipment, has_mpi
from unisono.launch.fork_server import ForkServer
from unisono.launch.outcome import Outcome
from unisono.launch.transport import SOCKETS, SYSFS, NetworkTransport, transports
from unisono.spec.errors import UnisonoError

GIB = 1 << 30
TORCH = (2, 13)


@dataclass(frozen=True)
class Check:
    """One thing looked at. `ok` is False for a fault; `note` marks what is worth knowing and no fault."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    note: bool = False

    def line(self) -> str:
        """Return the line that a person reads, with the remedy beneath."""
        mark = "fault" if not self.ok else "note" if self.note else "ok"
        text = f"{mark:<6}{self.name:<12}{self.detail}"
        return f"{text}\n{'':<18}try: {self.fix}" if self.fix else text


def run(*, quiet: bool = False) -> dict[str, Any]:
    """Look over this machine, printing as it goes (with `quiet` only faults); the object of `--json`."""
    rows: list[Check] = []

    def tell(check: Check) -> None:
        rows.append(check)
        if not quiet or not check.ok:
            print(check.line(), flush=True)

    wall, steady = time.time(), time.monotonic()
    for check in look(Path.cwd()):
        tell(check)
    for check in together():
        tell(check)
    tell(clock(time.time() - wall, time.monotonic() - steady, time.time()))
    faults = [check for check in rows if not check.ok]
    if not quiet:
        names = ", ".join(check.name for check in faults)
        print(f"not fit: {names}" if faults else "fit: every feature works here", flush=True)
    ways = [asdict(device) for device in transports()]
    return {"checks": [asdict(check) for check in rows], "transports": ways, "pass": not faults}


def look(folder: Path) -> list[Check]:
    """What can be seen without starting anything."""
    sights: list[Callable[[], Check]] = [
        python, torch, cores, memory, lambda: disk(folder), shared_memory, loopback,
        lambda: ways(transports(), os.environ), port,
    ]  # fmt: skip
    return [sight() for sight in sights]


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    return Check("python", fine, f"{version}  {sys.executable}", "" if fine else "Python 3.11 or newer")


def torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", False, "not installed", "pip install torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    fine = numbers >= TORCH
    return Check("torch", fine, version, "" if fine else "pip install 'torch>=2.13'")


def cores() -> Check:
    count = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max")
    if quota and not quota.startswith("max"):
        allowed, period = quota.split()
        share = int(allowed) / int(period)
        if share < count:
            return Check(
                "cores", True, f"{count}, but this container may use {share:.1f}",
                f"launch.ranks of {max(1, int(share))} or fewer for speed", note=True,
            )  # fmt: skip
    load = os.getloadavg()[0]
    if load > count:
        return Check(
            "cores", True, f"{count}, busy: load {load:.1f}", "wait before measuring speed", note=True
        )
    return Check("cores", True, str(count))


def memory() -> Check:
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    limit = _cgroup("memory.max")
    if limit.isdigit() and int(limit) < total:
        used = _cgroup("memory.current")
        total = int(limit)
        free = min(free, total - int(used or 0))
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free < GIB:
        return Check("memory", False, detail, "close other programs: a rank takes 0.3 GiB and more")
    return Check("memory", True, detail)


def disk(folder: Path) -> Check:
    """Room and the right to write where runs would go."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            "disk",
            False,
            f"cannot write in {folder} ({error.strerror})",
            "another folder, or out.dir in the recipe",
        )
    free = shutil.disk_usage(folder).free
    if free < GIB:
        return Check("disk", False, f"{free / GIB:.2f} GiB free in {folder}", "make room, or set out.dir")
    return Check("disk", True, f"{free / GIB:.1f} GiB free, writable")


def shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("/dev/shm", True, "not there", "mount a tmpfs there if data loaders need it", note=True)
    if free < GIB // 4:
        return Check(
            "/dev/shm", True, f"{free >> 20} MiB free", "docker run --shm-size=2g", note=True
        )  # fmt: skip
    return Check("/dev/shm", True, f"{free / GIB:.1f} GiB free")


def loopback() -> Check:
    """A connection from this machine to itself, over the interface that ranks use."""
    names = [name for _, name in socket.if_nameindex()]
    if "lo" not in names:
        return Check(
            "loopback",
            False,
            f"no interface lo (there are {', '.join(names)})",
            "export GLOO_SOCKET_IFNAME=NAME",
        )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=2.0) as near:
                far, _ = server.accept()
                with far:
                    near.sendall(b"x")
                    fine = far.recv(1) == b"x"
    except OSError as error:
        return Check(
            "loopback", False, f"cannot reach 127.0.0.1 ({error})", "ip link set lo up; look at the firewall"
        )
    return Check("loopback", fine, "127.0.0.1 on lo")


def ways(devices: Sequence[NetworkTransport], environ: Mapping[str, str]) -> Check:
    """What may carry bytes to other hosts, and whether what the environment names is there and up."""
    by_name = {device.name: device for device in devices if device.name}
    for variable in SOCKETS:
        for name in (part for part in environ.get(variable, "").removeprefix("=").split(",") if part):
            if devices and not name.startswith("^") and not _is_there(name, by_name):
                usable = ", ".join(device.name for device in by_name.values() if device.up)
                what = f"{variable} names {name}, which is " + (
                    "down" if name in by_name else "no device here"
                )
                return Check("transport", False, what, f"unset {variable}, or one of {usable}")
    if not devices:
        return Check(
            "transport", True, f"{SYSFS}/class/net says nothing", "mount sysfs to see devices", note=True
        )
    others = [device for device in devices if device.kind != "loopback"]
    words = ", ".join(device.says() for device in others if device.up) or "none is up"
    down = [device.name or device.rdma for device in others if not device.up]
    return Check(
        "transport", True, f"to other hosts: {words}" + (f"; down: {', '.join(down)}" if down else "")
    )


def _is_there(name: str, by_name: Mapping[str, NetworkTransport]) -> bool:
    """Gloo takes one name; NCCL takes the beginning of one."""
    return any(device.up for key, device in by_name.items() if key.startswith(name))


def port() -> Check:
    """Forked ranks open no port of ours; torchrun's usual one is looked at for those who use it."""
    try:
        with socket.create_server(("127.0.0.1", 29500)):
            return Check("port", True, "29500 free (torchrun)")
    except OSError:
        return Check(
            "port",
            True,
            "29500 in use: torchrun's default",
            "torchrun --standalone, or --master-port",
            note=True,
        )


def together() -> list[Check]:
    """Two ranks, forked, that sum: the way that training goes."""
    try:
        with ForkServer("unisono.launch.doctor_probe:entry") as nursery:
            outcome = nursery.run(
                {"small": 200, "large": 5}, 2, on_event=lambda rank, event: None, timeout=60.0, backend="gloo"
            )
    except UnisonoError as error:
        return [Check("all-reduce", False, error.what, error.fix)]
    return judge(outcome)


def judge(outcome: Outcome) -> list[Check]:
    """What the two ranks' doings say."""
    error, results = outcome.error, outcome.results[0]
    if error is not None or results is None:
        what = error.render().splitlines()[0] if error is not None else "no answer"
        fix = (
            error.fix if error is not None else ""
        ) or "run it again; if it stays, the lines above say where"
        return [Check("all-reduce", False, what, fix)]
    if not results["right"]:
        return [Check("all-reduce", False, "a wrong sum", "this machine computes wrongly: test its memory")]
    speed = 4 * (4 << 20) / (results["large_ms"] / 1e3)
    detail = f"2 ranks on gloo: {results['small_ms']:.2f} ms for 4 KiB, {speed / 1e6:.3g} MB/s for 16 MiB"
    checks = [Check("all-reduce", True, detail)]
    has = Equipment(len(results["gpus"]), frozenset(results["built"]), has_mpi())
    checks.append(Check("backend", True, has.says()))
    if results["gpus"]:
        checks.append(
            Check("gpu", True, f"{len(results['gpus'])}: {results['gpus'][0]}, {results['software']}")
        )
    else:
        checks.append(Check("gpu", True, "none: everything still works (gloo)", note=True))
    return checks


def clock(wall: float, steady: float, now: float) -> Check:
    """`wall` and `steady` are the seconds that passed on both clocks; `now` is Unix time."""
    if abs(wall - steady) > 0.25:
        return Check(
            "clock", False, f"was moved by {wall - steady:+.1f} s while we looked", "let NTP settle first"
        )
    if now < 1.7e9:
        return Check(
            "clock", False, time.strftime("stands at %Y-%m-%d", time.gmtime(now)), "set it, or start NTP"
        )
    return Check("clock", True, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
