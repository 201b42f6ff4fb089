"""python -m tests.library.catalogue [LOOP ...]: every loop under every plan, as a table; exit code 1 if one is different
in silence."""

import contextlib
import importlib.util
import io
import sys
import warnings

from tests.library.catalogue import PLANS, all_loops, on_ranks, verdict
from tests.threads import context
from unisono.comm.threads import run


def main() -> int:
    if not (hugging := importlib.util.find_spec("transformers") is not None):
        print("transformers is not installed: its six loops are not played", file=sys.stderr)
    loops = [one for one in all_loops(hugging) if one.name in sys.argv[1:] or not sys.argv[1:]]
    warnings.simplefilter("ignore")
    wrong = 0
    print("| loop |", " | ".join(PLANS), "|")
    print("| --- |", " | ".join("---" for _ in PLANS), "|")
    for one in loops:
        found = []
        with contextlib.redirect_stderr(io.StringIO()):
            (alone,) = run(1, lambda rank: on_ranks(context(rank, 1), "dp=1", [one]), join=False)  # noqa: B023
            for plan, size in PLANS.items():
                ranks = run(size, lambda rank: on_ranks(context(rank, size), plan, [one]), join=False)  # noqa: B023
                found.append(verdict(one, alone[one.name], [rank[one.name] for rank in ranks]))
        wrong += sum(said != one.expected(plan) for said, plan in zip(found, PLANS, strict=True))
        print(f"| {one.name} |", " | ".join(found), "|", flush=True)
    print(f"{len(loops)} loops under {len(PLANS)} plans, {wrong} not as expected")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
