"""What was measured here, as a cluster file that `plan`, `simulate` and `train` read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
