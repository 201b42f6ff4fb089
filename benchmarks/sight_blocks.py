"""What it costs a run to be seen, in % of its steps: blocks of steps with a part of it and without, in turn.

python benchmarks/sight_blocks.py                    # all parts, a GPT of 10 M parameters on dp=2, half an hour
python benchmarks/sight_blocks.py --what resources   # one part alone
python benchmarks/sight_blocks.py --pairs 9 --length 10   # a quick look, six minutes

off         nothing in both kinds of blocks: what chance makes of two equal ones
calls       when this rank was ready for each collective, and its rows as JSON in each step
modules     modules are timed in some steps, as often as in a run
resources   cores, memory, disk, network and GPUs of the host, a sample a second
profile     a profile of steps that are far away
dash        `unisono dash` beside the run, with one who looks on; in blocks without, it is stopped

Both kinds of blocks are of one run. Printed is the median of the pairs' ratios, less 1, and the 90 % interval of that
median. `cpu` is the same of what the ranks computed; that of dash, which is a process of its own, is not in it.
Pairs are played until others left the machine alone in `--pairs` of them, at most twice as many.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from overhead import MODEL, shares
from sight_rank import PARTS

from unisono.config import Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan


def measure(what: str, flags: argparse.Namespace) -> dict[str, Any]:
    """One row: shares of step time."""
    ranks, folder = Plan.parse(flags.plan).world, tempfile.mkdtemp(prefix="sight")
    train = TrainConfig(global_batch=4 * ranks, micro_batch=4, steps=1_000_000)
    recipe = Recipe(model=MODEL, train=train).model_dump_json(exclude_unset=True)
    argument = {"recipe": recipe, "folder": folder, **vars(flags), "what": what}
    try:
        with ForkServer("sight_rank:main", path=[str(Path(__file__).parent)]) as nursery:
            hear = lambda rank, event: print(event["text"]) if event["kind"] in ("output", "note") else None
            outcome = nursery.run(argument, ranks, 1, hear, 600.0, "gloo")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.error is not None:
        raise outcome.error
    results = [result for result in outcome.results if result is not None]
    if "absent" in results[0]:
        return {"what": what, "absent": results[0]["absent"]}
    row = shares([result["times"] for result in results], flags.pairs, 1)
    return {"what": what, "length": results[0]["length"], **row}


def line_of(row: dict[str, Any]) -> str:
    """A row for reading."""
    if "absent" in row:
        return f"{row['what']:<10} {row['absent']}"
    low, high = row["interval"]
    said = f"{row['what']:<10} {row['more']:+.2%} of a step, within {low:+.2%} .. {high:+.2%}; cpu {row['cpu']:+.2%}"
    pairs = f"{len(row['pairs'])} pairs of {row['length']} steps of {row['step_s'] * 1e3:.0f} ms"
    return f"{said}; {pairs}; others took up to {row['others']:.0%} of the cores"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=tuple(PARTS), action="append", help="these parts alone")
    parser.add_argument("--plan", default="dp=2")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=30, help="steps of a block")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = []
    for what in flags.what or PARTS:
        rows.append(measure(what, flags))
        if not flags.json:
            print(line_of(rows[-1]), flush=True)
    if flags.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
