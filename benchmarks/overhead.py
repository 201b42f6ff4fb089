"""What a run costs that watches over itself, in % of its steps: blocks of steps with all of it and without, in turn.

python benchmarks/overhead.py                             # a GPT of 10 M parameters on dp=2, all of it together
python benchmarks/overhead.py --plan shard=2              # the same where ranks put copies of themselves aside
python benchmarks/overhead.py --what guard                # one part alone; so are watchdog and snapshots
python benchmarks/overhead.py --what checkpoint           # asynchronous checkpoints instead, one each 50 steps
python benchmarks/overhead.py --what trackers --plan dp=1 --track tensorboard wandb    # trackers instead

Both kinds of blocks are of one run, so its tensors lie where they lay; pairs begin with either kind in turn. The figure
is the median of the pairs' ratios, less 1, with the 90 % interval of that median, by their order alone. Pairs are
played until other programs took less than 5 % of the cores during `--pairs` of them, at most three times as many; the
`--pairs` that were disturbed least count. In parts:

watchdog     the threads that look for a hang, speak with other ranks about it, answer from outside and wait for a
            hurry; each step told to the supervisor, and whether to stop asked. The supervisor itself looks on in all
            blocks: the share of a core that it takes in those without is put on top
guard       replicas compared and a gradient made twice, each 200 steps. Blocks hold no such step: it is timed beside
            one without, and a 200th of the difference is put on top of the pair's ratio
snapshots   as often as a run takes them by itself, on dp=2 never; `--every N`: each N steps
checkpoint  a block with one begins with it and ends when it is whole on disk; it counts once in `--every` steps (50)
trackers    a small GPT, whose steps are short and write their metrics in all blocks. With trackers the run hears
            of them, and their followers work; in the others the followers are stopped

`cpu` is the same of what all ranks computed. `clocks` is what all of it takes by its own clocks: processor time of the
threads beside, of the calls between steps, of a check and of the supervisor, over that of a step. It is what a step
would wait for if no core were ever free, and hardly changes with what else the machine does; what they slow by using
caches and memory is in the two others alone. Not switched off: the thread that hears of lost ranks, which wakes for
nothing else, and the recorder of spans.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from axes import interval
from overhead_rank import BESIDE

from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan

SAVED = 50
"""Steps between two checkpoints, where nobody says how many."""
MODEL = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
SHORT = ModelConfig(n_layer=2, n_head=2, d_model=64, context=32)
"""Whose step is of a few ms, beside which a part of one is seen."""


class Supervised:
    """Of the process that watches over the ranks: the share of a core that it takes, in blocks of each kind."""

    def __init__(self) -> None:
        self._spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self._begun: tuple[bool, float, float] | None = None

    def hear(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] in ("output", "note"):
            print(event["text"])
        if event["kind"] != "block" or rank:
            return
        now, cpu, with_ = time.perf_counter(), time.process_time(), event["with_"]
        if with_ is None and self._begun is not None:
            before, *since = self._begun
            self._spent[before].append((now - since[0], cpu - since[1]))
        self._begun = None if with_ is None else (with_, now, cpu)

    def share(self, with_: bool) -> float:
        spent = self._spent[with_]
        return sum(cpu for _, cpu in spent) / max(1e-9, sum(seconds for seconds, _ in spent))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """One row: shares of step time."""
    from unisono_contrib.train.watch.guard import PERIOD

    ranks, folder, supervised = (
        Plan.parse(given.plan).world,
        tempfile.mkdtemp(prefix="overhead"),
        Supervised(),
    )
    train = TrainConfig(global_batch=4 * ranks, micro_batch=4 // given.micros, steps=1_000_000)
    recipe = Recipe(model=SHORT if given.what == "trackers" else MODEL, train=train).model_dump_json(
        exclude_unset=True
    )
    argument = {"recipe": recipe, "folder": folder, **vars(given)}
    try:
        with ForkServer("overhead_rank:main", path=[str(Path(__file__).parent)]) as nursery:
            outcome = nursery.run(argument, ranks, 1, supervised.hear, 600.0, "gloo", recovers=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.error is not None:
        raise outcome.error
    found = [one for one in outcome.results if one is not None]
    saved, seen = given.what == "checkpoint", (supervised.share(False), supervised.share(True))
    length, every, more = (found[0]["length"], given.every or SAVED, (0.0, 0.0)) if saved else (1, 1, seen)
    return {
        "what": given.what, "plan": given.plan, "micros": given.micros, "period": PERIOD, "supervisor": seen,
        "parameters": sum(one["parameters"] for one in found),
        **{name: found[0][name] for name in ("snapshots", "stall_s", "notes", "length") if name in found[0]},
        **shares([one["times"] for one in found], given.pairs, PERIOD, more, length, every),
    }  # fmt: skip


def shares(
    times: list[dict[str, list[float]]],
    pairs: int,
    period: int,
    more: tuple[float, float] = (0.0, 0.0),
    length: int = 1,
    every: int = 1,
) -> dict[str, Any]:
    """What a step takes longer, by the times of all ranks: seconds of the slowest, processor time of all together.

    pairs: how many count, those that others disturbed least. period: steps between checks of the guard. more: shares
    of a core that the supervisor takes, in blocks without and in those with. length, every: what a block of so many
    steps takes longer counts once in `every` steps.
    """
    others = [max(pair) for pair in zip(times[0]["others_without"], times[0]["others_with"], strict=True)]
    counts = sorted(sorted(range(len(others)), key=others.__getitem__)[:pairs])

    def each(name: str, by: Callable[[tuple[float, ...]], float]) -> list[float]:
        return [by(tuple(one[name][number] for one in times)) for number in counts]

    def longer(without: list[float], with_: list[float]) -> list[float]:
        return [(b / a - 1) * length / every for a, b in zip(without, with_, strict=True)]

    without = each("without", max)
    checks = each("check", max) if "check" in times[0] else [0.0] * len(without)
    guard = [check / period / step for check, step in zip(checks, without, strict=True)]
    found = [one + g + more[0] for one, g in zip(longer(without, each("with", max)), guard, strict=True)]
    cpu = longer(each("cpu_without", sum), each("cpu_with", sum))
    clocks = [
        more[1] + max(_clocked(one, number, period, length / every) for one in times) for number in counts
    ]
    return {
        "step_s": statistics.median(without), "check_s": statistics.median(checks), "guard": statistics.median(guard),
        "more": statistics.median(found), "interval": interval(sorted(found)), "pairs": found, "played": len(others),
        "cpu": statistics.median(cpu), "cpu_interval": interval(sorted(cpu)), "every": every,
        "clocks": statistics.median(clocks), "clocks_interval": interval(sorted(clocks)),
        "others": max(others[number] for number in counts),
        **{f"{name}_s": by(times[0][name]) for name, by in
           (("call", statistics.median), ("lap_with", max), ("lap_without", max)) if name in times[0]},
    }  # fmt: skip


def _clocked(times: dict[str, list[float]], number: int, period: int, once: float) -> float:
    """What takes processor time beside steps of one rank in a pair, over that of a step."""
    step, check = times["cpu_without"][number], times["cpu_check"][number] if "cpu_check" in times else 0.0
    beside = times["beside_with"][number] - times["beside_without"][number]
    return times["lasting_with"][number] + beside / step * once + check / step / period


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    """A row for reading."""
    yield (
        f"{row['what']} on {row['plan']}, {row['parameters'] / 1e6:.1f} M parameters, steps of"
        f" {row['step_s'] * 1e3:.0f} ms, {len(row['pairs'])} pairs of blocks of {row['length']}"
    )
    for name, text in (
        ("more", "of step time"),
        ("cpu", "of processor time"),
        ("clocks", "by its own clocks"),
    ):
        low, high = row["interval" if name == "more" else f"{name}_interval"]
        ms, least, most = (share * row["step_s"] * 1e3 for share in (row[name], low, high))
        yield f"{name:<10} {row[name]:+.2%} {text}, 90 % within {low:+.2%} .. {high:+.2%}"
        yield f"           {ms:+.3f} ms a step, within {least:+.3f} .. {most:+.3f}"
    yield f"others     took up to {row['others']:.0%} of the cores in these pairs, of {row['played']} that were played"
    if row["what"] == "checkpoint":
        worst, usual = row["lap_with_s"] * 1e3, row["lap_without_s"] * 1e3
        yield f"for        one each {row['every']} steps; its call holds the loop for {row['call_s'] * 1e3:.0f} ms"
        yield f"worst step {worst:.0f} ms in blocks with a checkpoint, {usual:.0f} ms without"
        yield from (f"note       {note}" for note in row["notes"])
        return
    if row["check_s"]:
        yield (
            f"guard      {row['guard']:.2%} of that: a check takes {row['check_s'] * 1e3:.0f} ms,"
            f" every {row['period']} steps, micro-batches a rank: {row['micros']}"
        )
    without, with_ = row["supervisor"]
    yield f"supervisor takes {with_:.2%} of a core, and {without:.2%} without"
    if row.get("snapshots"):
        yield f"snapshots  every {row['snapshots']} steps; an update waited {row['stall_s'] * 1e3:.1f} ms for one"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("all", *BESIDE, "checkpoint", "trackers"), default="all")
    parser.add_argument("--plan", default="dp=2")
    parser.add_argument("--every", type=int, help="steps between two snapshots, or checkpoints")
    parser.add_argument("--micros", type=int, choices=(1, 2, 4), default=1, help="micro-batches of a rank")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=12, help="steps of a block, at least")
    parser.add_argument("--track", nargs="+", default=["tensorboard"], help="trackers, as in out.track")
    parser.add_argument("--mirror", action="store_true", help="a copy of each checkpoint in a second folder")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = measure(given)
    if given.json:
        print(json.dumps({"schema_version": 1, "rows": [row]}))
    else:
        print("\n".join(lines_of(row)))
