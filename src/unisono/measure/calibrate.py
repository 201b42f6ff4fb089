"""`unisono calibrate`: measure this machine in about half a minute, and write it down as a cluster. No torch here.

Ranks forked from one process measure products, copies and all-reduces: one rank for each GPU, or for each core.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from unisono.launch.fork_server import ForkServer, print_output
from unisono.observe.files import write_whole
from unisono.spec.errors import UsageError

ENTRY = "unisono.measure.rank:main"
_SILENCE = 120.0
_QUESTIONS = 3  # to ranks: which devices, what kernels take, what all-reduces take


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """One machine in numbers.

    device: name of its GPUs; `core` of a machine without any, whose ranks share its cores. count: GPUs, or cores.
    units: multiprocessors of a GPU. peak: FLOP/s by dtype. memory, reserved: bytes of one device, and of them those
    that are gone before the first tensor. bandwidth: bytes/s of its memory. link: (bytes/s of an all-reduce's bus,
    seconds of one message's latency); None of one device.
    """

    device: str
    count: int
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    reserved: float = 0.0
    units: int = 0
    link: tuple[float, float] | None = None

    @property
    def has_gpus(self) -> bool:
        return self.device != "core"


def as_toml(machine: MeasuredMachine, origin: str) -> str:
    """The text of a cluster file. origin: where and when it was measured."""
    seen = json.dumps(f"{machine.device}, {origin}" if machine.has_gpus else origin)
    source = f'origin = "measured here", source = {seen}'
    peak = ", ".join(f"{dtype} = {rate / 1e12:.5g}" for dtype, rate in machine.peak.items())
    lines = [
        f"# This machine, as measured: {origin}. Written by `unisono calibrate`, read by plan, simulate and train.",
        'name = "here"',
        f"node = {machine.count}",
    ]
    lines += ['stack = "plain"'] if machine.has_gpus else ['stack = "plain-cpu"', f"cores = {machine.count}"]
    lines += [
        "",
        "[device]",
        f"name = {json.dumps(machine.device)}",
        f"peak_tflops = {{ value = {{ {peak} }}, {source} }}  # of the best product",
        f"memory_gb = {{ value = {machine.memory / 1e9:.5g}, {source} }}",
        f"reserved_gb = {{ value = {machine.reserved / 1e9:.4g}, {source} }}",
        f"bandwidth_tb_s = {{ value = {machine.bandwidth / 1e12:.4g}, {source} }}",
    ]
    lines += [f"units = {{ value = {machine.units}, {source} }}"] if machine.units else []
    if machine.link:
        rate, latency = machine.link
        lines += [
            "",
            "[[link]]",
            f'name = "{"between GPUs" if machine.has_gpus else "loopback"}"',
            "size = 0",
            f"bandwidth_gb_s = {{ value = {rate / 1e9:.4g}, {source} }}  # of the bus of a large all-reduce",
            f"latency_us = {{ value = {latency * 1e6:.4g}, {source} }}",
        ]
    return "\n".join(lines) + "\n"


def link_between(ranks: int, all_reduces: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(bytes/s of the bus, seconds of one message's latency) from (bytes, seconds) of all-reduces.

    The largest is mostly bytes, the smallest mostly latency: that of 2 (n - 1) messages, one after the other in a ring.
    """
    (_, latest), *_, (size, seconds) = sorted(map(tuple, all_reduces))
    return 2 * (ranks - 1) / ranks * size / seconds, latest / (2 * (ranks - 1))


def run(
    out: Path, say: Callable[[str], None], tick: Callable[[float], None] = lambda share: None
) -> Mapping[str, Any]:
    """Measure and write `out`. Return the object of --json. tick: receives the share of all measurements that is done,
    after each. Raises UsageError where `out` cannot be written."""
    begun = time.perf_counter()
    _require_writable(out)
    machine = measured(say, tick)
    write_whole(
        out, as_toml(machine, f"{platform.machine()}, {time.strftime('%Y-%m-%d')}, unisono calibrate")
    )
    seconds = time.perf_counter() - begun
    say(f"{out}: written after {seconds:.0f} s")
    return {
        "file": str(out), "seconds": seconds, "gpus" if machine.has_gpus else "cores": machine.count,
        "products_gflops": machine.peak["fp32"] / 1e9,
    }  # fmt: skip


def measured(say: Callable[[str], None], tick: Callable[[float], None]) -> MeasuredMachine:
    """This machine in numbers."""
    cores = len(os.sched_getaffinity(0))
    with ForkServer(ENTRY) as nursery:

        def ask(what: str, ranks: int, done: int) -> dict[str, Any]:
            """The first rank's answer."""
            answer, *_ = nursery.run({"ask": what}, ranks, 1, print_output, _SILENCE).returned()
            tick(done / _QUESTIONS)
            return answer

        gpus = ask("devices", 1, 1)["gpus"]
        devices = f"{gpus} GPUs" if gpus else f"{cores} cores"
        say(f"{devices}: kernels ...")
        alone = ask("kernels", gpus or cores, 2)
        ranks = gpus or max(2, cores)
        link = None
        if ranks > 1:
            say(f"{devices}: all-reduces of {ranks} ranks ...")
            link = link_between(ranks, ask("all-reduces", ranks, 3)["all_reduces"])
    peak = {"fp32": _best(alone["float32"])}
    if "bfloat16" in alone:
        peak["bf16"] = _best(alone["bfloat16"])
    copied, seconds = max(alone["copies"], key=lambda timing: timing[0])
    return MeasuredMachine(
        device=alone["name"] if gpus else "core",
        count=gpus or cores,
        peak=peak,
        memory=float(alone["memory"]) if gpus else psutil.virtual_memory().total / cores,
        bandwidth=copied / seconds,
        reserved=0.0 if gpus else alone["resident"],
        units=int(alone["units"]) if gpus else 0,
        link=link,
    )


def _best(products: Sequence[Sequence[float]]) -> float:
    """FLOP/s of the fastest product."""
    return max(2.0 * m * k * n / seconds for m, k, n, seconds in products)


def _require_writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.{os.getpid()}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror}",
            where="--out",
            fix="--out FILE.toml in a folder of yours",
            code="E02",
        ) from None
