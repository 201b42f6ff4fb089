"""Whether a fuzz of stacks finds planted bugs, and how soon: `python -m tests.library.stack_fuzzed`.

Each wrong `train` of `wrong_trains.py` is played on the cases that one seed draws, 50 at most, until one of them is not
as one device. Without a bug all of them must pass. The exit code is 1 where more than one bug in twenty survives.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from tests.library import wrong_trains
from unisono_contrib.library.stack_fuzz.run import StackFuzz, StackResult, drawn, opened, playable

FILE = Path(wrong_trains.__file__)


def search(fuzz: StackFuzz, stack: str, names: list[str], cases: int, seed: int) -> dict[str, int]:
    """Bug → how many cases were played until it was found; "right" is no bug. Those that survive are not in it."""
    alive, found = ["right", *names], dict[str, int]()
    for tried, case in enumerate(islice(drawn({stack: playable(stack)}, seed, {}), cases), 1):
        for name in list(alive):
            result = StackResult()
            words = {**case.words, "train": f"{FILE}:{name}"}
            fuzz.prove(type(case)(stack, words, case.options), result)
            if result.failures:
                found[name] = tried
                alive.remove(name)
                cause = result.failures[0].row["cause"]
                print(
                    f"| {stack} | {'NO BUG' if name == 'right' else name} | {tried} | {case.plan} | {cause} |",
                    flush=True,
                )
        if alive in (["right"], []):
            break
    return found


def main(words: list[str]) -> int:
    """0 where at least 19 of 20 bugs are found, and nothing is without one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    flags = parser.parse_args(words)
    many = late = healthy = 0
    print("| stack | bug | cases until it is found | case | cause |\n| --- | --- | --- | --- | --- |")
    with opened() as fuzz:
        for stack in flags.stack:
            names = [name for name in wrong_trains.named(stack) if name.startswith(tuple(flags.only))]
            found = search(fuzz, stack, names, flags.cases, flags.seed)
            lost = [name for name in names if name not in found]
            print("".join(f"| {stack} | {name} | SURVIVES | | |\n" for name in lost), end="")
            many, late, healthy = many + len(names), late + len(lost), healthy + ("right" in found)
    print(f"{many - late} of {many} bugs found within {flags.cases} cases")
    return 20 * late > many or bool(healthy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
