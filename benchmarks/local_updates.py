"""What local updates send and lose, and which policy ends lower than which: figures of whole runs over three seeds.

    python benchmarks/local_updates.py sparse --json local.json    SparseLoCo beside DDP, about 25 minutes on two cores
    python benchmarks/local_updates.py orders --json local.json    order relations between policies, about 20 minutes
    python benchmarks/local_updates.py tune --json local.json      how the settings of `sparse` were chosen

A file is gone on with where it was cut off. Runs are those of `kept_runs`, with replicas as threads of one process.
`sparse` trains a GPT of 3 M parameters, `orders` one of 0.3 M. Settings were chosen on other seeds than those that are
printed. Bytes are what ranks count as they send, without heads of frames.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kept_runs import KeptRuns, OneProcess, WholeRun

from unisono_contrib.measure.benches import columns

RANKS, H = 4, 30
SEEDS, TUNING = (0, 1, 2), 10

# SparseLoCo.
STEPS = 900
LOCK_STEP = f"dp={RANKS}"
ONE_DEVICE = f"dp=1 micros={RANKS}"
"""It computes what lock-step computes, with which no time is lost where cores are few."""
SPARSE = f"dp={RANKS} sync=diloco:h={H},outer_lr={{outer}},outer_momentum={{momentum}} codec=chunktopk+ef:beta={{beta}}"
OF_FP32, OF_FP32_STEP, GAP = 200, 6000, 0.10
LR = {"lock-step": 4e-4, "sparse": 3e-4}
CHOSEN = {"outer": 4, "momentum": 0, "beta": 0.95}
MUON_LR = 1e-3
LAGS = (0, 1, 2, 4, 8)
GRID = (
    *((LOCK_STEP, lr) for lr in (3e-3, 1e-3, 6e-4, 4e-4)),
    *((f"dp={RANKS} sync=local_sgd:h={H}", lr) for lr in (1e-3,)),
    *((SPARSE.format(outer=1, momentum=0, beta=beta), 3e-3) for beta in (0.8, 0.95, 0.99)),
    *((SPARSE.format(outer=outer, momentum=0, beta=0.95), 1e-3) for outer in (1, 2)),
    (SPARSE.format(outer=2, momentum=0, beta=0.99), 1e-3),
    (SPARSE.format(outer=2, momentum=0.5, beta=0.95), 5e-4),
    (SPARSE.format(outer=3, momentum=0, beta=0.95), 5e-4),
    (SPARSE.format(outer=4, momentum=0, beta=0.95), 3e-4),
)
TUNING_STEPS = 1200
"""Of each run of the grid, on seed TUNING."""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By the name of a way, its run of each seed."""


@dataclass(frozen=True, slots=True)
class Relation:
    """what: in words. ways: what is played for it, by a name of its own. holds(runs): a sentence of figures, and
    whether it holds."""

    what: str
    ways: Mapping[str, WholeRun]
    holds: Callable[[Runs], tuple[str, bool]]


# Medians, and what is asked of them.


def loss_of(run: Mapping[str, Any]) -> float:
    return run["points"][-1][1]


def median_loss(runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(map(loss_of, runs))


def no_worse(better: str, than: str, runs: Runs, within: float = 0.0) -> tuple[str, bool]:
    """Whether the median loss of one is no higher than that of another, up to `within`."""
    low, high = median_loss(runs[better]), median_loss(runs[than])
    return f"{better} {low:.4f}, {than} {high:.4f}", low <= high + within


def rises(names: Sequence[str], runs: Runs) -> tuple[str, bool]:
    """Whether median losses rise in this order."""
    losses = [median_loss(runs[name]) for name in names]
    figures = ", ".join(f"{name} {loss:.4f}" for name, loss in zip(names, losses, strict=True))
    return figures, losses == sorted(losses)


def slower(names: Sequence[str], runs: Runs) -> tuple[str, bool]:
    """Whether more updates are needed in this order to the loss that all of them reach."""
    target = max(median_loss(runs[name]) for name in names)
    rows = [(name, statistics.median(updates_to(target, run) for run in runs[name])) for name in names]
    figures = ", ".join(f"{name} {updates:.0f}{mean_staleness(runs[name])}" for name, updates in rows)
    return f"updates to {target:.4f}: {figures}", [row[1] for row in rows] == sorted(row[1] for row in rows)


def mean_staleness(runs: Sequence[Mapping[str, Any]]) -> str:
    """In words, where servers have counted it."""
    means = [sum(i * n for i, n in enumerate(x)) / sum(x) for run in runs if sum(x := run["staleness"])]
    return f" (staleness {statistics.median(means):.2f})" if means else ""


def updates_to(target: float, run: Mapping[str, Any]) -> float:
    """Updates until the held-out loss is no higher, between two looks in proportion; infinite where it never is. Under
    `async` each replica's gradient is an update."""
    before = (0, 0.0)
    for at, loss in run["points"]:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[0] else 1.0
            return (before[0] + share * (at - before[0])) * WholeRun(**run["run"]).ranks
        before = (at, loss)
    return float("inf")


# What is asked for.


def small(plan: str, seed: int, steps: int = 480, lr: float = 1e-3, **more: Any) -> WholeRun:
    return WholeRun(plan, seed, steps, lr, "small", **more)


def relations(seed: int) -> list[Relation]:
    """Of one seed's runs."""
    make = partial(small, seed=seed)
    outer = "outer_lr=0.7,outer_momentum=0.5"
    diloco = f"sync=diloco:h={H},{outer}"
    stale = lambda dp: small(f"dp={dp} sync=async", seed, 960 // dp, batch=dp, every=60 // dp)
    local = {f"h={h}": make(f"dp={RANKS} sync=local_sgd:h={h}") for h in (1, 4, 16, 64)}
    post = make(f"dp={RANKS} sync=local_sgd:h=16,warmup=120")
    whole, parts = make(f"dp={RANKS} {diloco}"), make(f"dp={RANKS} {diloco},fragments=4,delay=2,alpha=0.5")
    return [
        Relation(
            "DiLoCo with one replica is no worse than plain training",
            {"diloco": make(f"dp=1 {diloco}"), "plain": make("dp=1")},
            partial(no_worse, "diloco", "plain"),
        ),
        *(
            Relation(
                f"Muon inside is no worse than AdamW inside, {dp} replica{'s' * (dp > 1)}",
                {
                    "muon": make(f"dp={dp} {diloco}", optimizer="muon", lr=MUON_LR),
                    "adamw": make(f"dp={dp} {diloco}"),
                },
                partial(no_worse, "muon", "adamw"),
            )
            for dp in (1, 2, RANKS)
        ),
        Relation(
            "streaming (4 parts, delay 2, alpha 0.5) is within 0.03 of DiLoCo",
            {"streaming": parts, "diloco": whole},
            partial(no_worse, "streaming", "diloco", within=0.03),
        ),
        Relation(
            "its most bytes in a step are at most 1/3.5",
            {"streaming": parts, "diloco": whole},
            lower_peak,
        ),
        Relation(
            "post-local SGD is no worse than local SGD at equal bytes and steps",
            {"post-local": post, "local": make(f"dp={RANKS} sync=local_sgd:h=4")},
            partial(no_worse, "post-local", "local"),
        ),
        Relation(
            "post-local SGD is no worse than local SGD at equal steps and h",
            {"post-local": post, "local": make(f"dp={RANKS} sync=local_sgd:h=16")},
            partial(no_worse, "post-local", "local"),
        ),
        Relation("the loss rises with h", local, partial(rises, tuple(local))),
        Relation(
            "updates to a loss rise with the lag of sync=delayed",
            {f"lag {lag}": make(f"dp=1 sync=delayed:lag={lag}", every=30) for lag in LAGS},
            partial(slower, tuple(f"lag {lag}" for lag in LAGS)),
        ),
        Relation(
            "updates to a loss rise with the staleness of sync=async",
            {f"{dp} replicas": stale(dp) for dp in (1, 2, RANKS)},
            partial(slower, tuple(f"{dp} replicas" for dp in (1, 2, RANKS))),
        ),
    ]


def lower_peak(runs: Runs) -> tuple[str, bool]:
    parts, whole = (max(run["payload_peak"] for run in runs[name]) for name in ("streaming", "diloco"))
    return (
        f"streaming {parts / 1e6:.3f} MB, diloco {whole / 1e6:.3f} MB: 1/{whole / parts:.2f}",
        3.5 * parts <= whole,
    )


# The three studies.


def orders(nursery: OneProcess, kept: KeptRuns, seeds: Sequence[int]) -> None:
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    refused: dict[str, str] = {}
    for seed in seeds:
        for relation in relations(seed):
            for name, wanted in relation.ways.items():
                run = kept.play(nursery, wanted)
                if "refused" in run:
                    refused[relation.what] = run["refused"]
                else:
                    runs.setdefault((relation.what, name), []).append(run)
    rows = [("relation", "", f"medians of {len(seeds)} seeds")]
    for relation in relations(seeds[0]):
        if relation.what in refused:
            rows.append((relation.what, "not run", refused[relation.what]))
            continue
        figures, holds = relation.holds({name: runs[relation.what, name] for name in relation.ways})
        rows.append((relation.what, "holds" if holds else "FAILED", figures))
    print("\n".join(columns(rows[0], rows[1:])))


def sparse(nursery: OneProcess, kept: KeptRuns, seeds: Sequence[int]) -> None:
    plans = {"lock-step": ONE_DEVICE, "sparse": SPARSE.format(**CHOSEN)}
    runs = {
        name: [kept.play(nursery, WholeRun(plan, seed, STEPS, LR[name], every=STEPS // 8)) for seed in seeds]
        for seed in seeds[:1]
        for name, plan in plans.items()
    }
    gaps = [
        loss_of(ours) - loss_of(theirs)
        for ours, theirs in zip(runs["sparse"], runs["lock-step"], strict=True)
    ]
    rows = [
        (str(seed), f"{loss_of(theirs):.4f}", f"{loss_of(ours):.4f}", f"{gap:+.4f}")
        for seed, theirs, ours, gap in zip(seeds, runs["lock-step"], runs["sparse"], gaps, strict=True)
    ]
    print(f"{plans['sparse']}, {STEPS} steps")
    print("\n".join(columns(("seed", "lock-step", "SparseLoCo", "gap"), rows)))
    gap = statistics.median(gaps)
    print(f"gap, median: {gap:+.4f} nat, at most {GAP:g} asked: {'yes' if gap <= GAP else 'NO'}")
    sparse_run, whole = (
        runs["sparse"][0],
        kept.play(nursery, WholeRun(LOCK_STEP, seeds[0], STEPS, LR["lock-step"], until=20)),
    )
    # A ring's all-reduce sends 2 (n-1)/n of what a replica has in fp32; of a gather each replica's message goes to n-1.
    fp32 = whole["payload_peak"] * RANKS / (2 * (RANKS - 1))
    step = sparse_run["payload_bytes"] / (RANKS - 1) / STEPS
    message = step * H
    for what, ratio, least in (
        ("a replica's message of a mean exchange", fp32 / message, OF_FP32),
        (f"... of a mean step, h={H}", fp32 / step, OF_FP32_STEP),
    ):
        print(f"{what}: 1/{ratio:.1f} of fp32, at most 1/{least} asked: {'yes' if ratio >= least else 'NO'}")
    most = fp32 * (RANKS - 1) / sparse_run["payload_peak"]
    total = whole["payload_peak"] * STEPS / sparse_run["payload_bytes"]
    print(
        f"the largest message: 1/{most:.1f}; all that a rank sends to all others: 1/{total:.0f} of lock-step's"
    )


def tune(nursery: OneProcess, kept: KeptRuns, seeds: Sequence[int]) -> None:
    rows = []
    for plan, lr in GRID:
        run = kept.play(nursery, WholeRun(plan, TUNING, TUNING_STEPS, lr, every=TUNING_STEPS // 4))
        rows.append((plan, f"{lr:g}", f"{loss_of(run):.4f}"))
    print("\n".join(columns(("plan", "lr", f"loss after {TUNING_STEPS} steps, seed {TUNING}"), rows)))


STUDIES = {"sparse": sparse, "orders": orders, "tune": tune}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=tuple(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--json", metavar="FILE", help="runs; what is there already is not run again")
    options = parser.parse_args()
    STUDIES[options.study](OneProcess(), KeptRuns(options.json), options.seeds)


if __name__ == "__main__":
    sys.exit(main())
