"""What codecs cost in quality: the held-out loss of a small GPT after equal steps under each of them, beside fp32.

    python benchmarks/quality.py                                   all, about 25 minutes on two quiet cores
    python benchmarks/quality.py --json quality.json               the same; cut off, it goes on where it was
    python benchmarks/quality.py --codecs int8 int4+ef --seeds 0 1 --steps 240

A byte-level GPT of about 300,000 parameters learns the standard library's sources on two replicas, under `unisono
train`'s own step, in cosine decay to a tenth. A seed draws weights and samples; with one seed all codecs begin alike
and see the same. Held-out loss is in nats a byte, of the same windows for all. CODEC@sgd is trained by SGD with
momentum.

loss: mean over seeds, and how far they spread (standard deviation). more: mean over seeds of the loss above that of
fp32 with the same optimiser and the same seed. noise: twice the standard error of the difference of the two means.
`within noise` holds where more <= noise; what a target asks it of has `yes` or `NO`. `one device` is fp32 again, with
the sum in another order: what rounding alone does in so many steps.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.codecs import CODECS
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer
from unisono.spec.errors import UsageError
from unisono.spec.training import OPTIMISERS
from unisono_contrib.measure.benches import columns

PLAIN, ALONE, SGD = "plain", "one device", "@sgd"
ASKED = ("cast:bf16", "int8", "int4+ef")  # to be within noise
WAYS = (
    PLAIN, ALONE, "cast:fp16", "cast:bf16", "cast:fp8", "int8", "int4", "int4+ef", "int4+ef21", "qsgd", "ternary",
    "ternary:clip=1+ef", "topk:ratio=0.01+ef", "topk:ratio=0.01,kind=chunked+ef", "topk:ratio=0.01+ef21",
    "threshold:ratio=0.02+ef", "randomk:ratio=0.1+ef", "block:ratio=0.1+ef", "powersgd:r=4+ef",
    "plain@sgd", "sign+ef@sgd", "topk:ratio=0.01+mc@sgd", "sign+ef@onebit_adam",
    "sign+ef@zeroone_adam",
)  # fmt: skip
FROZEN = ("onebit_adam", "zeroone_adam")  # what crosses is no gradient that could be clipped
LR = {"adamw": 3e-3, "sgd": 0.3}
RANKS, WINDOWS = 2, 510


def recipe_of(way: str, seed: int, steps: int) -> Recipe:
    """Of one run. Raises UsageError for an optimiser that is not there."""
    optimizer = way.partition("@")[2] or "adamw"
    OPTIMISERS.read(optimizer, "--codecs")
    own = {"momentum": 0.0} if "+mc" in way else {}  # it has a momentum of its own
    if optimizer in FROZEN:
        own = {"clip": 0.0, **({"variance_steps": steps // 5} if optimizer == "onebit_adam" else {})}
    lr = LR.get(optimizer.partition(":")[0], LR["adamw"])
    return Recipe(
        name="quality", seed=seed,
        model=ModelConfig(n_layer=3, n_head=4, d_model=88, context=64),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(
            steps=steps, global_batch=6, micro_batch=3, optimizer=optimizer, lr=lr, min_lr=lr / 10,
            lr_schedule="cosine", warmup_steps=max(1, steps // 20), eval_batches=WINDOWS // 6, **own,
        ),
    )  # fmt: skip


def there(ways: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(what can be asked for, why the rest cannot)."""
    found, missing = [], {}
    for way in ways:
        codec, _, optimizer = way.partition("@")
        try:
            CODECS.read(PLAIN if codec == ALONE else codec, "--codecs")
            OPTIMISERS.read(optimizer or "adamw", "--codecs")
        except UsageError as error:
            missing[way] = error.what
        else:
            found.append(way)
    return found, missing


def main() -> int:
    options = arguments()
    ways, missing = there(options.codecs)
    for way, why in missing.items():
        print(f"skipped {way}: {why}")
    kept = Path(options.json) if options.json else None
    runs = json.loads(kept.read_text())["runs"] if kept and kept.exists() else []
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    begun = time.perf_counter()
    with ForkServer("whole_runs:main", path=[str(Path(__file__).parent)]) as nursery:
        for seed in options.seeds:  # seed by seed, so that what is cut off has each codec once
            for way in ways:
                if way in missing or _known(runs, way, seed, options.steps):
                    continue
                run = played(nursery, way, seed, options.steps)
                if "refused" in run:
                    missing[way] = run["refused"]
                    print(f"skipped {way}: {run['refused']}", flush=True)
                    continue
                runs.append(run)
                print(f"{way:<34} seed {seed}  {run['loss']:.4f}  {run['seconds']:.1f} s", flush=True)
                _keep(kept, runs, options.steps)
    rows = table_of([run for run in runs if run["steps"] == options.steps and run["way"] in ways])
    _keep(kept, runs, options.steps)
    print()
    for line in lines_of(rows):
        print(line)
    missed = [row["way"] for row in rows if row["met"] is False]
    print(f"\n{len(missed)} of {sum(row['met'] is not None for row in rows)} rows with a target miss it")
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes, load {os.getloadavg()[0]:.1f}")
    return 1 if missed and options.strict else 0


def _known(runs: Sequence[Mapping[str, Any]], way: str, seed: int, steps: int) -> bool:
    return any((run["way"], run["seed"], run["steps"]) == (way, seed, steps) for run in runs)


def _keep(kept: Path | None, runs: Sequence[Mapping[str, Any]], steps: int) -> None:
    if kept is not None:
        rows = table_of([run for run in runs if run["steps"] == steps])
        beside = kept.with_name(kept.name + ".part")
        beside.write_text(
            json.dumps({"schema_version": 1, "runs": list(runs), "rows": rows}, indent=1) + "\n"
        )
        beside.replace(kept)


def played(nursery: ForkServer, way: str, seed: int, steps: int) -> dict[str, Any]:
    """One run; or why it is refused."""
    codec = way.partition("@")[0]
    ranks = 1 if codec == ALONE else RANKS
    plan = "dp=1 micros=2" if codec == ALONE else f"dp={ranks} codec={codec}"
    recipe = recipe_of(way, seed, steps).model_dump_json(exclude_unset=True)
    asked = {"recipe": recipe, "plan": plan, "way": codec, "steps": steps}
    begun = time.perf_counter()
    outcome = nursery.run(asked, ranks, 1, timeout=300.0, backend="gloo")
    if outcome.error is not None or outcome.results[0] is None:
        if outcome.error is not None and outcome.error.code and outcome.error.code.startswith(("P", "C")):
            return {"refused": outcome.error.what}
        raise SystemExit(outcome.why())
    got: Any = outcome.results[0]
    return {
        "way": way, "seed": seed, "steps": steps, "loss": got["points"][-1][1], "load": got["load"],
        "seconds": time.perf_counter() - begun, "processor_s": got["processor_s"],
        "payload_bytes_step": got["payload_bytes"] / steps,
    }  # fmt: skip


def table_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each codec, in the order in which they were first run."""
    by_way: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_way.setdefault(run["way"], {})[run["seed"]] = run
    return [row_of(way, mine, by_way.get(baseline(way), {})) for way, mine in by_way.items()]


def baseline(way: str) -> str:
    """The run without a codec that stands beside it."""
    return PLAIN + SGD if way.endswith(SGD) else PLAIN


def row_of(
    way: str, mine: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """mine, theirs: runs by seed. Only seeds that both have are compared."""
    losses = [run["loss"] for run in mine.values()]
    shared = [seed for seed in mine if seed in theirs]
    more = [mine[seed]["loss"] - theirs[seed]["loss"] for seed in shared]
    noise = None
    if len(shared) > 1 and way != baseline(way):
        both = [[side[seed]["loss"] for seed in shared] for side in (mine, theirs)]
        noise = 2 * math.sqrt(sum(statistics.variance(x) for x in both) / len(shared))
    within = None if noise is None else statistics.mean(more) <= noise
    sent = statistics.mean(run["payload_bytes_step"] for run in mine.values())
    dense = statistics.mean(run["payload_bytes_step"] for run in theirs.values()) if theirs else 0.0
    return {
        "way": way, "seeds": sorted(mine), "loss": statistics.mean(losses), "losses": losses,
        "spread": statistics.stdev(losses) if len(losses) > 1 else None,
        "more": statistics.mean(more) if more else None, "more_by_seed": more, "noise": noise, "within_noise": within,
        "payload_bytes_step": sent, "payload_ratio": sent / dense if dense else None,
        "met": within if way in ASKED else None,
    }  # fmt: skip


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ("codec", "loss", "spread", "by seed", "more", "noise", "within noise", "sent", "of fp32")
    return columns(head, [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    def told(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    within = "–" if row["within_noise"] is None else "within" if row["within_noise"] else "beyond"
    mark = "" if row["met"] is None else " yes" if row["met"] else " NO"
    return (
        row["way"], told(row["loss"], ".4f"), told(row["spread"], ".4f"),
        " ".join(format(loss, ".3f") for loss in row["losses"]), told(row["more"], "+.4f"), told(row["noise"], ".4f"),
        within + mark, f"{row['payload_bytes_step'] / 1e3:.1f} kB", told(row["payload_ratio"], ".3f"),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--codecs", nargs="+", default=list(WAYS), metavar="CODEC", help="CODEC, or CODEC@OPTIMISER"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=960, help="of each run (960)")
    parser.add_argument(
        "--json", metavar="FILE", help="runs and rows; what is there already is not run again"
    )
    parser.add_argument("--strict", action="store_true", help="leave with 1 where a target is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
