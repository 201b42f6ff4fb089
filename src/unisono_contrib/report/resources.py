"""What hosts and ranks took of their machines, as `out.track = ["resources"]` wrote it: the reader, and the section of
the report. No torch.

    hosts, ranks = read("runs/demo/latest")
    hosts["gpu08"].samples[-1]["cores"]     # busy cores, of all processes of this host
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from unisono.observe.metrics import read_lines
from unisono.report import html
from unisono.report.collect import RunRecord
from unisono.spec import words
from unisono.spec.words import is_number, percent

FULL = 0.95  # of the memory of a host
HOT = 87  # degrees Celsius of a GPU
_LONGEST = 30.0  # seconds between two samples of one stretch of a run
HEADS = (
    "host",
    "cores busy",
    "memory, most",
    "swap",
    "disk written/s",
    "disk free",
    "network/s",
    "GPUs busy",
    "power",
)


@dataclass(frozen=True, slots=True)
class ResourceSeries:
    """Samples of one host or rank in order of time. facts: what its first line says."""

    facts: Mapping[str, Any]
    samples: tuple[Mapping[str, Any], ...]

    def values(self, *path: str) -> list[float]:
        """The numbers at a path of keys, as `values("disk", "free_mib")`. Those of `values("net", "eth0")` are of both
        ways together."""
        return [value for sample in self.samples if (value := _number(sample, path)) is not None]


def read(folder: str | Path) -> tuple[dict[str, ResourceSeries], dict[int, ResourceSeries]]:
    """({host: samples}, {rank: samples}) of a run folder; empty where nothing was sampled. Never raises for what is
    absent or damaged."""
    hosts, ranks = dict[str, ResourceSeries](), dict[int, ResourceSeries]()
    for path in sorted((Path(folder) / "resources").glob("*.jsonl")):
        name = path.stem
        try:
            lines, _ = read_lines(path)
        except OSError:
            continue
        facts = next((line for line in reversed(lines) if line.get("kind") == "info"), {})
        samples = tuple(
            line for line in lines if is_number(line.get("at")) and isinstance(line.get("step"), int)
        )
        if name.startswith("host-"):
            hosts[name.removeprefix("host-")] = ResourceSeries(facts, samples)
        elif name.removeprefix("rank").isdigit():
            ranks[int(name.removeprefix("rank"))] = ResourceSeries(facts, samples)
    return hosts, ranks


def joules_per_token(hosts: Mapping[str, ResourceSeries], steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Joules of all hosts for a token (or sample) that was trained on, over the steps that each host sampled; None
    where a host does not tell its energy. steps: lines of metrics.jsonl."""
    tokens = {line["step"]: float(line["tokens"]) for line in steps if is_number(line.get("tokens"))}
    costs = [_per_token(series.samples, tokens) for series in hosts.values()]
    return sum(cost for cost in costs if cost is not None) if costs and None not in costs else None


def _per_token(samples: Sequence[Mapping[str, Any]], tokens: Mapping[int, float]) -> float | None:
    joules = trained = 0.0
    for before, after in pairwise(samples):
        both = before.get("joules"), after.get("joules")
        near = 0 < after["at"] - before["at"] <= _LONGEST
        if (
            near
            and isinstance(both[0], dict)
            and isinstance(both[1], dict)
            and before["step"] <= after["step"]
        ):
            joules += sum(both[1][source] - both[0][source] for source in both[0] if source in both[1])
            trained += sum(tokens.get(step, 0.0) for step in range(before["step"] + 1, after["step"] + 1))
    return joules / trained if trained and joules > 0 else None


def troubles(hosts: Mapping[str, ResourceSeries]) -> list[str]:
    """Sentences about what was too full, too hot or broken."""
    said = list[str]()
    for name, series in hosts.items():
        total = series.facts.get("memory_mib")
        least = min(series.values("available_mib"), default=None)
        if is_number(total) and least is not None and total and 1 - least / total > FULL:
            said.append(f"Memory of {name} was {percent(1 - least / total)} full.")
        swap = series.values("swap_mib")
        if swap and swap[-1] - swap[0] > 64:
            said.append(f"{name} swapped out {words.mebibytes(swap[-1] - swap[0])} while it trained.")
        gpus = [gpu for sample in series.samples for gpu in _gpus(sample)]
        hot = max((gpu["celsius"] for gpu in gpus if is_number(gpu.get("celsius"))), default=0)
        if hot > HOT:
            said.append(f"A GPU of {name} was at {hot:.0f} °C.")
        slowed = fmean(bool(gpu.get("throttled")) for gpu in gpus) if gpus else 0.0
        if slowed > 0.05:
            said.append(
                f"GPUs of {name} ran at lower clocks for heat or power in {percent(slowed)} of samples."
            )
        if broken := max((gpu["ecc"] for gpu in gpus if is_number(gpu.get("ecc"))), default=0):
            said.append(f"A GPU of {name} counts {broken:.0f} uncorrected memory errors.")
    return said


def section(run: RunRecord) -> str:
    """A row for each host, and the energy of a token; nothing of a run that was not sampled."""
    hosts, _ = read(run.folder)
    rows = [_row(name, series) for name, series in hosts.items() if series.samples]
    if not rows:
        return ""
    joules = joules_per_token(hosts, run.steps)
    unit = run.unit.removesuffix("s")
    energy = (
        f" A {unit} took {joules:.3g} J of the processors that tell their energy."
        if joules is not None
        else ""
    )
    notes = " ".join(troubles(hosts))
    said = html.note(f"Means over {sum(len(series.samples) for series in hosts.values())} samples.{energy}")
    return html.section(
        "resources",
        "Resources",
        html.table(HEADS, rows, numeric=len(HEADS) - 1),
        html.note(notes) if notes else "",
        said,
    )


def _row(name: str, series: ResourceSeries) -> list[str]:
    total, cores = series.facts.get("memory_mib"), series.facts.get("cores")
    least = min(series.values("available_mib"), default=None)
    used = words.mebibytes(total - least) if isinstance(total, int) and least is not None else "–"
    busy = series.values("cores")
    nets = [sample["net"] for sample in series.samples if isinstance(sample.get("net"), dict)]
    rates = {link: series.values("net", link) for net in nets for link in net}
    links = {link: fmean(values) for link, values in rates.items() if values}
    link = max(links, key=lambda each: links[each], default="")
    gpus = [gpu for sample in series.samples for gpu in _gpus(sample)]
    share = [gpu["busy"] for gpu in gpus if is_number(gpu.get("busy"))]
    watts = [
        sum(gpu.get("watts", 0.0) for gpu in _gpus(sample)) for sample in series.samples if _gpus(sample)
    ]
    return [
        name,
        f"{fmean(busy):.1f}" + (f" of {cores}" if cores else "") if busy else "–",
        used,
        words.mebibytes(max(series.values("swap_mib"), default=0.0)),
        words.mebibytes(fmean(series.values("disk", "write_mib_s") or [0.0])),
        words.mebibytes(min(series.values("disk", "free_mib"), default=0.0)),
        f"{words.nbytes(links[link])} ({link})" if link else "–",
        percent(fmean(share)) if share else "–",
        f"{fmean(watts):.0f} W" if watts else "–",
    ]


def _gpus(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    gpus = sample.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _number(sample: Any, path: Sequence[str]) -> float | None:
    for key in path:
        sample = sample.get(key) if isinstance(sample, dict) else None
    if isinstance(sample, list):
        return sum(sample) if all(map(is_number, sample)) else None
    return sample if is_number(sample) else None
