"""The input pipeline of a step: what each host has to load, and whether it keeps up.

A host prepares the next batches while its devices compute. Reading, decoding and handing over work side by side, so the
slowest of them sets the pace, and only what takes longer than all else of a step is waited for (the stall analysis of
Mohan et al., "Analyzing and mitigating data stalls in DNN training", 2021).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.priced import Model
from unisono.planner.stack import Stack
from unisono.planner.work.sample import Sample

FLAGS = "--loader-samples-s, --loader-gb-s"


@dataclass(frozen=True, slots=True)
class Loading:
    """One step's samples. hosts: that load, those of the first stage. each: samples that one of them loads. tokens: of
    a sample, 1 of what has none. rates: samples/s that a host gives, by what limits it; what nobody has said is not
    there. said: whether it is known what the loader itself gives."""

    hosts: int
    each: int
    tokens: int
    sample: Sample
    rates: Mapping[str, float]
    said: bool

    @property
    def limit(self) -> tuple[str, float]:
        """(what is slowest, samples/s of one host); infinitely many where nothing is known."""
        return min(self.rates.items(), key=lambda pair: pair[1], default=("", float("inf")))

    @property
    def seconds(self) -> float:
        """Of loading one step's samples."""
        return self.each / self.limit[1]


def loading(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Loading:
    """What the plan asks of each host. Ranks that work on the same samples read them once a host."""
    loader, own = cluster.loader, micro_batch * micros
    host = min(loader.devices or cluster.node, cluster.devices)

    def here(axis: str) -> int:
        """Ranks of an axis' group that lie on one host."""
        return min(getattr(plan, axis), max(1, host // stride(plan, axis, cluster.order)))

    readers = here("dp") * here("shard")
    spread = ceil(plan.tp / here("tp")) * ceil(plan.cp / here("cp"))
    stored = loader.stored or model.sample.stored
    rates: dict[str, float] = {}
    if loader.samples:
        rates["decoding"] = loader.samples
    if loader.bandwidth and stored:
        rates["storage"] = loader.bandwidth / stored
    if cluster.device.host and model.sample.copied:
        rates["copying to devices"] = readers * cluster.device.host * stack.host_link / model.sample.copied
    return Loading(
        hosts=ceil(plan.replicas / readers) * spread,
        each=own * readers,
        tokens=model.context,
        sample=Sample(stored, model.sample.copied),
        rates=rates,
        said=bool(loader.samples or loader.bandwidth),
    )


def shown(got: Loading, step: float) -> float:
    """Seconds of a step that go by in waiting for data. step: seconds of all else."""
    return max(0.0, got.seconds - step)


def as_json(got: Loading, step: float) -> Mapping[str, Any]:
    """The key `data` of `simulate --json`. step: seconds without waiting for data."""
    what, rate = got.limit
    return {
        "data": {
            "hosts": got.hosts,
            "samples_per_host": got.each,
            "needs_samples_s": got.each / step,
            "needs_tokens_s": got.each * got.tokens / step,
            "stored_bytes": got.sample.stored,
            "copied_bytes": got.sample.copied,
            "gives_samples_s": dict(got.rates),
            "limit": what or None,
            "gives": rate if got.rates else None,
            "said": got.said,
            "seconds": got.seconds,
            "exposed_s": shown(got, step),
        }
    }


def as_text(got: Loading, step: float) -> str:
    """A line of the page: what each host has to load, what it gives, and what of it is waited for."""
    needs = got.each / step
    many = f"each of {got.hosts:,} hosts has" if got.hosts > 1 else "the host has"
    tokens = f"{_many(needs * got.tokens)} tokens/s, " if got.tokens > 1 else ""
    told = (
        f"data       {many} to load {_many(needs)} samples/s"
        f" ({tokens}{_bytes(needs * got.sample.stored)}/s as stored);\n           "
    )
    what, rate = got.limit
    if late := shown(got, step):
        return f"{told}{what} gives {_many(rate)}: {late:.4g} s of a step go by in waiting for data"
    if not got.said:
        return f"{told}counted as hidden: what a loader gives is not said ({FLAGS})"
    return f"{told}hidden: {what} gives {_many(rate)}"


def _bytes(size: float) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u), (1.0, "B"))
    return f"{size / unit:.3g} {name}"


def _many(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100.0 else f"{rate:.3g}"
