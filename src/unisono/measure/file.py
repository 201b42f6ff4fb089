"""What was measured here, as a cluster file that `plan`, `simulate` and `train` read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from unisono.planner.machines.host import Host, Pace


@dataclass(frozen=True, slots=True)
class FittedHost:
    """A host, and how well it explains what it was fitted to: relative errors by what was measured."""

    host: Host
    fitted: Mapping[str, list[float]] = field(default_factory=dict)

    def errors(self) -> dict[str, float]:
        """Mean of the absolute relative errors."""
        return {what: sum(map(abs, each)) / len(each) for what, each in self.fitted.items() if each}


def as_toml(measured: FittedHost, device: Mapping[str, float], origin: str) -> str:
    """The text of a cluster file. device: `memory` in bytes, `bandwidth` in bytes/s, `peak DTYPE` in FLOP/s."""
    host = measured.host
    source = f'origin = "measured here", source = {json.dumps(origin)}'
    peak = ", ".join(
        f"{name.removeprefix('peak ')} = {rate / 1e12:.5g}"
        for name, rate in device.items()
        if name.startswith("peak ")
    )
    slowest = host.curves["all_reduce:2"]
    lines = [
        f"# This machine, as measured: {origin}. Written by `unisono calibrate`, read by plan, simulate and train.",
        'name = "here"',
        f"node = {host.cores}",
        'stack = "plain-cpu"',
        "",
        "[device]",
        f"peak_tflops = {{ value = {{ {peak} }}, {source} }}",
        f"memory_gb = {{ value = {device['memory'] / 1e9 / host.cores:.5g}, {source} }}  # of each core",
        f"bandwidth_tb_s = {{ value = {device['bandwidth'] / 1e12:.4g}, {source} }}",
        "",
        "[[link]]",
        'name = "loopback"',
        "size = 0",
        f"bandwidth_gb_s = {{ value = {slowest.nbytes[-1] / slowest.seconds[-1] / 1e9:.4g}, {source} }}",
        f"latency_us = {{ value = {slowest.seconds[0] * 1e6:.4g}, {source} }}",
        "",
        "[host]",
        f"cores = {host.cores}",
        f"crowd = {host.crowd:.4f}  # how much longer work takes, beyond its share, with two ranks to a core",
        f"error = {host.error:.3f}  # mean, of the steps of several ranks that this was fitted to",
        f"step_us = {host.step * 1e6:.4g}",
        f"update_us = [{', '.join(f'{part * 1e6:.6g}' for part in host.update)}]  # fixed, per tensor, per element",
        "",
        "# Microseconds per million: FLOPs, bytes, elements of masks; and per operation that is started.",
    ]
    for name, pace in (("forward", host.forward), ("backward", host.backward)):
        lines += [f"[host.{name}]", *(f"{f.name} = {_scaled(f.name, pace):.6g}" for f in fields(Pace)), ""]
    lines += ["# Collectives by operation and ranks: [bytes in all, microseconds].", "[host.curves]"]
    for key, curve in host.curves.items():
        points = ", ".join(
            f"[{int(n)}, {s * 1e6:.4g}]" for n, s in zip(curve.nbytes, curve.seconds, strict=True)
        )
        lines.append(f'"{key}" = [{points}]')
    lines += ["", "# What a collective of an axis costs beside itself, microseconds.", "[host.calls_us]"]
    lines += [f'"{axis}" = {seconds * 1e6:.4g}' for axis, seconds in host.calls.items()]
    lines += ["", "# And for a million bytes of it, microseconds.", "[host.copies_us]"]
    lines += [f'"{axis}" = {seconds * 1e12:.4g}' for axis, seconds in host.copies.items()]
    lines += ["", "# What a rank has beside what it needs: megabytes, share of what passes, pieces gathered.",
              "[host.memory_mb]"]  # fmt: skip
    lines += [
        f"{axis} = [{fixed / 1e6:.5g}, {share:.4g}, {pieces:.4g}]"
        for axis, (fixed, share, pieces) in host.memory.items()
    ]
    return "\n".join(lines) + "\n"


def gpus_as_toml(
    name: str, device: Mapping[str, float], count: int, units: int,
    met: Sequence[tuple[str, int, float]] | None, origin: str,
) -> str:  # fmt: skip
    """The text of a cluster file for the GPUs of one machine. device: as above; met: (operation, bytes, seconds)."""
    source = f'origin = "measured here", source = {json.dumps(f"{name}, {origin}")}'
    peak = ", ".join(
        f"{key.removeprefix('peak ')} = {rate / 1e12:.5g}"
        for key, rate in device.items()
        if key.startswith("peak ")
    )
    lines = [
        f"# This machine's GPUs, as measured: {origin}. Written by `unisono calibrate`.",
        'name = "here"',
        f"node = {count}",
        'stack = "plain"',
        "",
        "[device]",
        f"peak_tflops = {{ value = {{ {peak} }}, {source} }}  # of the best product",
        f"memory_gb = {{ value = {device['memory'] / 1e9:.5g}, {source} }}",
        f"bandwidth_tb_s = {{ value = {device['bandwidth'] / 1e12:.4g}, {source} }}",
        f"units = {{ value = {units}, {source} }}",
    ]
    if met:
        sums = sorted((size, seconds) for op, size, seconds in met if op == "all_reduce")
        size, seconds = sums[-1]
        bus = 2 * (count - 1) / count * size / seconds
        latency = sums[0][1] / (2 * (count - 1))
        lines += [
            "",
            "[[link]]",
            'name = "between GPUs"',
            "size = 0",
            f"bandwidth_gb_s = {{ value = {bus / 1e9:.4g}, {source} }}  # of the bus of an all-reduce of {size} bytes",
            f"latency_us = {{ value = {latency * 1e6:.4g}, {source} }}",
        ]
    return "\n".join(lines) + "\n"


def _scaled(name: str, pace: Pace) -> float:
    return getattr(pace, name) * (1e6 if name == "launch" else 1e12)
