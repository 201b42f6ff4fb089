"""Whether a fuzz finds planted bugs, and how soon: `python -m tests.verify.fuzzed`.

Each bug of `tests/verify/mutations` that a plan shows is planted; plans drawn from one seed are proven until one fails,
200 at most. A bug that raises is not found by that. Without a bug all of them must pass. The exit code is 1 where more than one bug in twenty survives.
"""

import argparse
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.verify.mutations.entry import CATALOGUE
from unisono.verify.prover import Proof
from unisono_contrib.verify.fuzz.draw import documents
from unisono_contrib.verify.fuzz.run import drawn, is_wrong, proofs_of

ENTRY = "tests.verify.mutations.entry:main"


def search(names: list[str], plans: int, seed: int, texts: Path) -> dict[str, int]:
    """Bug → how many plans were proven until it was found; "" is no bug. Those that survive are not in it."""
    alive, found, number, tried = ["", *names], dict[str, int](), 0, 0
    while len(alive) > 1 and tried < plans:
        cases, number = drawn(seed, number, texts)[0], number + 1
        for case in cases[: plans - tried]:
            tried += 1
            proofs = proofs_of([case] * len(alive), ENTRY, alive)
            for name, proof in zip(list(alive), proofs, strict=True):
                if is_wrong(proof) and not (name and _is_in_the_way(proof)):
                    found[name] = tried
                    alive.remove(name)
                    print(f"| {name or 'NO BUG'} | {tried} | {case.plan} | {proof.cause} |", flush=True)
    return found


def _is_in_the_way(proof: Proof) -> bool:
    """Whether a planted bug raised in a plan that it was not written for, which is no silent mistake that was found; a
    world in which all ranks wait is one."""
    return proof.cause == "raised" and "WorldEnded" not in (proof.explanation or "")


def search_beside(jobs: int, names: list[str], plans: int, seed: int, texts: Path) -> dict[str, int]:
    """`search` by several processes, each with some of the bugs."""
    parts = [names[i::jobs] for i in range(jobs) if names[i::jobs]]
    if len(parts) < 2:
        return search(names, plans, seed, texts)
    # Spawned: a fork of torch's threads would hang.
    with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
        searches = [pool.submit(search, part, plans, seed, texts) for part in parts]
        return {name: tried for each in searches for name, tried in each.result().items()}


def main(words: list[str]) -> int:
    """0 where at least 19 of 20 bugs are found, and nothing is without one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bugs", type=int, help="so many of them, drawn by the seed")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes, each with a part of the bugs")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    flags = parser.parse_args(words)
    names = [name for name, bug in CATALOGUE.items() if bug.loop is None and not bug.test]
    names = [name for name in names if name.startswith(tuple(flags.only))]
    if flags.bugs is not None:
        names = random.Random(flags.seed).sample(names, min(flags.bugs, len(names)))
    with TemporaryDirectory() as folder:
        found = search_beside(flags.jobs, names, flags.plans, flags.seed, documents(Path(folder)))
    late = [name for name in names if name not in found]
    print("".join(f"| {name} | SURVIVES | shown by {CATALOGUE[name].plan} | |\n" for name in late), end="")
    print(f"{len(names) - len(late)} of {len(names)} found within {flags.plans} plans")
    return 20 * len(late) > len(names) or "" in found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
