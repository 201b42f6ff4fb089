"""Everything that others can write or send, made hostile: no code is run, nothing crashes, hangs or takes all memory.

    python -m tests.security.fuzz --inputs 100000      all kinds; prints what became of how many, exits with 1 if any is wrong
    python -m tests.security.fuzz --only plans,store   some kinds
    python -m tests.security.fuzz --again plans:4711   one input, shown and played again

Wrong is: a canary file comes to be, a program or a socket is begun, a file is written elsewhere, an exception that no
user is told in words, an error that steers a terminal, more than 5 s of a core, 120 s without a word, 1 GiB of memory.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.security import links, streams, tables, weights, words
from tests.security.confined import Kind, Tally, given, played
from tests.train.state.checkpoint.fuzz import fuzz as hostile_checkpoints

KINDS: tuple[Kind, ...] = (
    words.PLANS, words.FLAGS, words.VARIABLES, words.COMMANDS, words.CHAOS, tables.RECIPES, tables.CLUSTERS, streams.FRAMES, streams.STORE,
    streams.MESSAGES, streams.ALIVE, links.GREETINGS, links.ANSWERS, links.TAMPERED, links.DOORS, weights.SAFETENSORS, weights.PICKLES, weights.OTHERS, weights.CONFIGS,
)  # fmt: skip
OWN = "manifests"
"""Checkpoints of our own, which have a reader of hostile ones themselves."""
_OWN_SHARE = 6.0
_BATCH = 2000  # inputs that one child plays, with what their caches take


def play(kind: Kind, count: int, seed: int = 0, batch: int = _BATCH) -> Tally:
    """The first `count` inputs of a kind."""
    tally = Tally(kind.name)
    for first in range(0, count, batch):
        some = played(kind, range(first, min(count, first + batch)), seed)
        tally.tried += some.tried
        tally.seen += some.seen
        tally.wrong += some.wrong
        tally.slowest = max(tally.slowest, some.slowest)
    return tally


def play_own(count: int, seed: int = 0) -> Tally:
    """Hostile manifests, headers and files of checkpoints of ours."""
    with tempfile.TemporaryDirectory() as place:
        told = hostile_checkpoints(Path(place) / "own", count, seed)
    tally = Tally(OWN, told["tried"], wrong=told["wrong"])
    tally.seen.update({what: n for what, n in told["seen"].items() if "MiB" not in what})
    return tally


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """How many of each kind; they come to `inputs`."""
    weigh = {kind.name: kind.share for kind in KINDS} | {OWN: _OWN_SHARE}
    whole = sum(weigh[name] for name in names)
    counts = {name: int(inputs * weigh[name] / whole) for name in names}
    counts[names[0]] += inputs - sum(counts.values())
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="some of the kinds")
    parser.add_argument("--again", default="", metavar="KIND:NUMBER", help="one input")
    asked = parser.parse_args()
    kinds = {kind.name: kind for kind in KINDS}
    if asked.again:
        name, _, number = asked.again.partition(":")
        print(ascii(given(kinds[name], int(number), asked.seed)))
        tally = played(kinds[name], range(int(number), int(number) + 1), asked.seed)
        print(tally.line(), *tally.wrong, sep="\n")
        return 1 if tally.wrong else 0
    began, tallies = time.monotonic(), []
    for name, count in shares(asked.inputs, asked.only.split(",") if asked.only else [*kinds, OWN]).items():
        tallies.append(play(kinds[name], count, asked.seed) if name in kinds else play_own(count, asked.seed))
        print(tallies[-1].line(), *tallies[-1].wrong[:20], sep="\n  WRONG ", flush=True)
    wrong = sum(len(tally.wrong) for tally in tallies)
    tried = sum(tally.tried for tally in tallies)
    print(f"{tried} hostile inputs in {time.monotonic() - began:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
