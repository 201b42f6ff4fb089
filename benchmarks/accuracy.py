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
from tests.planner import forms, published
from unisono.planner.accuracy import Summary, crossed, sampled, summary
from unisono.planner.calibrate import Row, errors, fit
from unisono.planner.stack import stack

HEAD = (
    f"{'set':<34}{'rows':>5}{'mean':>7}{'median':>8}{'p95':>7}{'max':>7}{'bias':>7}{'rank':>7}{'regret':>8}"
)


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


def line(name: str, rows: Sequence[Row], wrong: Sequence[float]) -> None:
    s: Summary = summary(rows, wrong)
    rank = f"{s.rank:7.3f}{s.regret:8.2f}" if s.rank is not None else f"{'-':>7}{'-':>8}"
    print(f"{name:<34}{s.rows:>5}{s.mean:7.2f}{s.median:8.2f}{s.p95:7.2f}{s.max:7.2f}{s.bias:+7.2f}{rank}")


def memory() -> None:
    """ZeRO's table 1 and Korthikanti's figures 1 and 7."""
    print("\nmemory; errors in per cent")
    for name, pairs in published.memory_pairs().items():
        wrong = sorted(abs(ours / theirs - 1.0) * 100 for ours, theirs in pairs)
        print(f"{name:<34}{len(wrong):>5}  mean {sum(wrong) / len(wrong):.3f}  max {wrong[-1]:.3f}")


def timetables() -> None:
    """Bubble rates of the zero-bubble paper's table 5, from one set of costs; and the published closed forms."""
    print(f"\nbubble rates, one set of costs (F, B, W, message): {forms.COSTS}; differences, absolute")
    rates = forms.rates()
    for column in forms.COLUMNS:
        apart = [abs(ours - theirs) for _, name, ours, theirs in rates if name == column]
        print(f"{column:<34}{len(apart):>5}  mean {sum(apart) / len(apart):.4f}  max {max(apart):.4f}")
    print(
        "closed forms of bubble, micro-batches held, copies of weights, beside the played timetables; absolute"
    )
    for name in forms.FORMS:
        pairs = forms.closed(name)
        print(f"{name:<34}{len(pairs):>5}  max {max(abs(a - b) for a, b in pairs):.4f}")
    print(f"not in a plan's vocabulary: {', '.join(forms.NOT_NAMED)}")


def speed() -> None:
    rows = published.vtrain_multi()
    made = stack("megatron-deepspeed")
    begun = time.process_time()
    for row in rows:
        row.predicted(made)
    print(f"\nplans priced in a second, on one core: {len(rows) / (time.process_time() - begun):,.0f}")


def fitted() -> None:
    """The constants as fitted to all rows of each set, beginning where the shipped ones are."""
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
