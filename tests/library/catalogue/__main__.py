"""python -m tests.library.catalogue [--plans dp=2,shard=2] [--only LOOP]: every loop under every plan, as a table, and
what `unisono.prove` says of those that are different in silence. Exit code 1 if one is, and it does not convict it; or
if a healthy one is accused."""

import argparse
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Sequence

from tests.library.catalogue import PLANS, all_loops, hard_loops
from tests.library.catalogue.playing import Row, rows


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--plans", default=",".join(PLANS), help="by commas")
    flags.add_argument("--only", action="append", default=[], metavar="LOOP", help="may be repeated")
    flags.add_argument("--hard", action="store_true", help="those of the reviews and of their kinds alone")
    flags.add_argument("--no-proof", action="store_true", help="do not ask the prover")
    args = flags.parse_args()
    plans, hugging = args.plans.split(","), importlib.util.find_spec("transformers") is not None
    if not hugging:
        print("transformers is not installed: its six loops are not played", file=sys.stderr)
    known = [*([] if args.hard else all_loops(hugging)), *hard_loops()]
    loops = [one for one in known if one.name in args.only or not args.only]
    warnings.simplefilter("ignore")
    print("| loop | was |", " | ".join(plans), "|")
    print("| --- | --- |", " | ".join("---" for _ in plans), "|")
    found: list[Row] = []
    for one in loops:
        own = rows(one, plans, prove=not args.no_proof)
        found += own
        print(f"| {one.name} | {one.verdict} |", " | ".join(map(str, own)), "|", flush=True)
    return told(found, len(loops), plans)


def told(found: Sequence[Row], loops: int, plans: Sequence[str]) -> int:
    """Prints the sums; the exit code."""
    kinds = Counter(row.said.split()[0] for row in found)
    print(f"{loops} loops under {len(plans)} plans:", ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    were = [row for row in found if row.was_silent]
    now = [row for row in were if row.said.split()[0] in ("equal", "told", "refused")]
    share = f"{len(now) / len(were):.0%}" if were else "none"
    print(f"formerly silent: {len(were)}, of which equal, told or refused now: {len(now)} ({share})")
    wrong = 0
    for what, those in (
        ("healthy, and not equal", [r for r in found if r.healthy and r.said != "equal"]),
        ("equal, and accused by unisono.prove", [r for r in found if r.said == "equal" and r.convicted]),
        (
            "silent, and not convicted",
            [r for r in found if r.silent and not r.convicted and r.proof is not None],
        ),
    ):
        print(
            f"{what}: {len(those)}",
            *(f"\n  {r.loop.name} under {r.plan}: {r.said if r.proof is None else r.proof}" for r in those),
        )
        wrong += len(those)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
