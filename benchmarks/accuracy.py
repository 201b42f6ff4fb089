"""How right the planner is: its prices beside published measurements. `make accuracy`

    python benchmarks/accuracy.py          every set, as shipped and cross-validated; about a minute
    python benchmarks/accuracy.py --fast   as shipped only
    python benchmarks/accuracy.py --fit    fits the constants again and prints them
    python benchmarks/accuracy.py --rows "vtrain multi-node"   each row of a set

The rows are those in tests/fixtures/planner, the only ones that constants were fitted to; other published rows are left
alone, for judging.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.constants import counted
from benchmarks.fitting.accuracy import Summary, beyond, by_one, crossed, quantile, sampled, summary
from benchmarks.fitting.calibrate import MeasuredStep, errors, fit
from benchmarks.fitting.fits import fused_attention, rings, slack
from tests.planner import forms, published
from unisono.planner.stack import stack

HEAD = (
    f"{'set':<38}{'rows':>5}{'mean':>7}{'median':>8}{'p95':>7}{'max':>7}{'bias':>7}{'rank':>7}{'regret':>8}"
)


KERNEL = ("matmul", "depth", "wave")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Prices beside published measurements; errors in per cent.")
    parser.add_argument("--fast", action="store_true", help="no cross-validation")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--rows", metavar="SET", choices=tuple(published.SETS), help="each row of a set")
    given = parser.parse_args(words)
    if given.rows:
        each_row(given.rows)
    elif given.fit:
        fitted()
    else:
        tables(given.fast)
        kernels()
        memory()
        timetables()
        speed()
        print(counted())


def tables(fast: bool) -> None:
    """Every set as shipped; fitted on parts of itself and judged on the rest."""
    print("seconds of a step; errors in per cent")
    print(HEAD)
    for name, (read, named, constants) in published.SETS.items():
        rows, made = read(), stack(named)
        line(f"{name}, as shipped", rows, errors(rows, made))
        if fast or not constants:
            continue
        line("  five folds, held out", rows, crossed(rows, made, constants))
        if name == "vtrain multi-node":
            line("  two halves, held out", rows, crossed(rows, made, constants, folds=2))
        if name == "vtrain single-node":
            line("  fitted on 50, the others", *sampled(rows, made, constants, 50))
    for name in (
        "korthikanti table 5",
        "vtrain single-node",
        "vtrain multi-node",
        "mosaic fsdp",
        "mosaic fsdp h100",
        "megatron h100",
    ):
        rows = published.SETS[name][0]()
        wrong = errors(rows, stack("plain"))
        line(f"{name}, stack plain", rows, wrong)
        few("  scaled to another row", by_one(wrong))
    if not fast:
        print(
            "\nfitted to one end of a set, judged at the other; last: the mean error that a price would announce"
        )
        for label, (name, inside) in published.BEYOND.items():
            read, named, constants = published.SETS[name]
            rest, wrong, announced = beyond(read(), stack(named), constants, inside)
            line(label, rest, wrong, f"{announced:8.2f}")


def line(name: str, rows: Sequence[MeasuredStep], wrong: Sequence[float], more: str = "") -> None:
    s: Summary = summary(rows, wrong)
    rank = f"{s.rank:7.3f}{s.regret:8.2f}" if s.rank is not None else f"{'-':>7}{'-':>8}"
    print(
        f"{name:<38}{s.rows:>5}{s.mean:7.2f}{s.median:8.2f}{s.p95:7.2f}{s.max:7.2f}{s.bias:+7.2f}{rank}{more}"
    )


def kernels() -> None:
    """Single kernels and collectives beside what was measured."""
    print("\nseconds of kernels; errors in per cent")
    shapes, plain = published.products(), stack("plain")
    own = fit(shapes, plain, KERNEL)
    few("150 products, A100 PCIe, as fitted", errors(shapes, own))
    few("  five folds, held out", crossed(shapes, plain, KERNEL))
    for gpu in ("a100", "v100"):
        rows = published.all_reduces(gpu)
        ring = rings(rows)
        few(f"all-reduce, {gpu}, as fitted", [ring.seconds(n, moved) / s - 1.0 for n, moved, s in rows])


def few(name: str, wrong: Sequence[float]) -> None:
    sizes = sorted(100 * abs(e) for e in wrong)
    print(
        f"{name:<38}{len(sizes):>5}{sum(sizes) / len(sizes):7.2f}{quantile(sizes, 0.5):8.2f}"
        f"{quantile(sizes, 0.95):7.2f}{sizes[-1]:7.2f}{100 * sum(wrong) / len(wrong):+7.2f}"
    )


def memory() -> None:
    """ZeRO's table 1 and Korthikanti's figures 1 and 7."""
    print("\nmemory; errors in per cent")
    for name, pairs in published.memory_pairs().items():
        wrong = sorted(abs(ours / theirs - 1.0) * 100 for ours, theirs in pairs)
        print(f"{name:<38}{len(wrong):>5}  mean {sum(wrong) / len(wrong):.3f}  max {wrong[-1]:.3f}")


def timetables() -> None:
    """Bubble rates of the zero-bubble paper's table 5, from one set of costs; and the published closed forms."""
    print(f"\nbubble rates, one set of costs (F, B, W, message): {forms.COSTS}; differences, absolute")
    rates = forms.rates()
    for column in forms.COLUMNS:
        apart = [abs(ours - theirs) for _, name, ours, theirs in rates if name == column]
        print(f"{column:<38}{len(apart):>5}  mean {sum(apart) / len(apart):.4f}  max {max(apart):.4f}")
    print(
        "closed forms of bubble, micro-batches held, copies of weights, beside the played timetables; absolute"
    )
    for name in forms.FORMS:
        pairs = forms.closed(name)
        print(f"{name:<38}{len(pairs):>5}  max {max(abs(a - b) for a, b in pairs):.4f}")
    print(f"not in a plan's vocabulary: {', '.join(forms.NOT_NAMED)}")


def speed() -> None:
    rows = published.vtrain_multi()
    made = stack("megatron-deepspeed")
    begun = time.process_time()
    for row in rows:
        row.predicted(made)
    print(f"\nplans priced in a second, on one core: {len(rows) / (time.process_time() - begun):,.0f}")


def fitted() -> None:
    """The constants as fitted to all rows of each set, beginning where the shipped ones are; and those of kernels and
    of all-reduces in one node, as fitted to what was measured of these alone."""
    shapes, plain = published.products(), stack("plain")
    made = fit(shapes, plain, KERNEL)
    print(f"{'products, A100':<22}", "  ".join(f"{key} {getattr(made, key):.4g}" for key in KERNEL))
    print(f"{'fused attention, A100':<22} attention {fused_attention(published.attention_shares()):.3g}")
    print(f"{'allocators':<22} slack {slack(published.allocators()):.3g}")
    for gpu in ("a100", "v100"):
        ring = rings(published.all_reduces(gpu))
        buses = "  ".join(f"{members} members {rate / 1e9:.1f} GB/s" for members, rate in ring.bus)
        print(
            f"{'all-reduce, ' + gpu:<22} {buses}  hop {ring.hop * 1e6:.2f} us  base {ring.base * 1e6:.1f} us"
        )
    for name, (read, named, constants) in published.SETS.items():
        if constants:
            made = fit(read(), stack(named), constants)
            print(f"{name:<22}", "  ".join(f"{key} {getattr(made, key):.4g}" for key in constants))


def each_row(name: str) -> None:
    read, named, _ = published.SETS[name]
    for row in read():
        predicted = row.predicted(stack(named))
        print(
            f"{row.group:<24} {row.plan!s:<70} micro_batch {row.micro_batch:<4} measured {row.seconds:8.3f} s"
            f"  predicted {predicted:8.3f} s  {100 * (predicted / row.seconds - 1):+6.1f} %"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
