"""Steps and memory as priced after `unisono calibrate`, beside what `train` takes on this machine.

    python benchmarks/cpu_truth.py                        calibrates, then 3 models x 19 plans: about ten minutes
    python benchmarks/cpu_truth.py --cluster FILE.toml    with a calibration that is there
    python benchmarks/cpu_truth.py --kinds llama gelu convnet mlp own     four plans of each kind of model, in turns;
                                                          context and away: of cp, and of offload
    python benchmarks/cpu_truth.py --links 0 1000 100     also between two hosts with a link of so many Mbit/s (root)

Without a file it calibrates before each link: a machine that others share changes within minutes. Each plan runs in
processes of its own. Prices of a CPU host are those of any cluster, so they are rough; `plan=auto` measures there
(`benchmarks/auto_truth.py`).
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lab

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.measure.recipes import of, sized
from unisono.config import Loaded, ModelConfig, Recipe, resolve
from unisono.launch.fork_server import ForkServer
from unisono.measure import calibrate
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster, Link
from unisono.planner.predict import of_ranks
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.verbs._sizes import model_of


def sizes(n_layer: int, n_head: int, d_model: int, context: int, vocab: int = 256) -> dict[str, Any]:
    return {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "context": context, "vocab": vocab}


def pictures(side: int, kind: str, **own: Any) -> dict[str, Any]:
    return {"kind": kind, "image": (3, side, side), "classes": 10, **own}


MODELS = {
    "1M": sized(sizes(4, 4, 128, 64), 16),
    "10M": sized(sizes(8, 4, 320, 128), 8),
    "19M": sized(sizes(6, 8, 512, 128), 8),
}
PLANS = {
    2: ("dp=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "tp=2", "pp=2 micros=4",
        "pp=2 schedule=gpipe micros=4", "dp=2 micros=2 recompute=full", "shard=2 zero=3 micros=2"),
    4: ("dp=4", "shard=4 zero=3", "dp=2 shard=2 zero=2", "tp=4", "dp=2 tp=2", "dp=2 pp=2 micros=4",
        "shard=2 tp=2", "shard=2 zero=2 pp=2 micros=2", "pp=4 micros=4", "tp=2 pp=2 micros=4"),
}  # fmt: skip
_LLAMA = {"n_kv_head": 4, "activation": "swiglu", "norm": "rms", "positions": "rotary", "bias": False,
          "tie_embeddings": False}  # fmt: skip
_OWN = str(Path(__file__).parents[1] / "examples" / "own_model.py") + ":smoother"
# A model of every kind, and four plans of each.
KINDS = {
    "llama": (sized(sizes(6, 8, 256, 128) | _LLAMA, 8), ("dp=1", "dp=2", "tp=2", "pp=2 micros=2")),
    "gelu": (sized(sizes(4, 4, 128, 64), 16), ("dp=1", "dp=2", "tp=2", "pp=2 micros=2")),
    "convnet": (sized(pictures(32, "convnet", n_layer=6, channels=32), 16),
                ("dp=1", "dp=2", "shard=2", "pp=2 micros=2")),
    "mlp": (sized(pictures(16, "mlp", hidden=(512,) * 4), 64), ("dp=1", "dp=2", "shard=2", "pp=2 micros=2")),
    "context": (sized(sizes(4, 8, 256, 256), 4),
                ("dp=1", "cp=2", "cp=2 cp_kind=gather", "cp=2 cp_kind=ulysses")),
    "away": (sized(sizes(4, 8, 256, 128), 8),
             ("dp=1", "offload=optimizer", "offload=params:to=disk", "offload=activations")),
    "own": (of(ModelConfig(kind=_OWN, d_model=64, context=128, vocab=256), 16),
            ("dp=1", "dp=2", "shard=2", "shard=2 zero=1")),
}  # fmt: skip
REGRET_LIMIT = 0.15


def main() -> int:
    options = arguments()
    given = cluster(options.cluster) if options.cluster else None
    if options.kinds:
        return of_every_kind(given or calibrated(), options)
    rows: list[dict[str, Any]] = []
    heads = f"{'link':<12}{'model':<7}{'plan':<31}{'step ms':>9}{'priced':>9}"
    print(f"{heads}{'error':>8}{'MiB':>7}{'priced':>7}{'error':>8}")
    with ForkServer("truth_rank:main", path=[str(Path(__file__).parent)]) as nursery:
        for megabits in options.links:
            if megabits and not lab.possible():
                print(f"{megabits:.0f} Mbit/s: skipped, needs root and the tools ip and tc")
                continue
            base = given or calibrated()
            with lab.link(megabits) if megabits else nullcontext(()) as hosts:
                for name in options.models:
                    for ranks in options.ranks:
                        for plan in PLANS[ranks]:
                            rows.append(row(nursery, base, megabits, hosts, name, ranks, plan, options))
                            print(line_of(rows[-1]), flush=True)
    return summed(rows, options.json)


def of_every_kind(base: Cluster, options: argparse.Namespace) -> int:
    """Four plans of each kind of model, priced and played in turns: 1 where the one that is priced best is measured
    more than 15 % slower than the best of the four."""
    worst, errors = 0.0, list[float]()
    print(f"{'model':<9}{'plan':<16}{'step ms':>9}{'priced':>9}{'error':>8}  in turns")
    with ForkServer("truth_rank:main", path=[str(Path(__file__).parent)]) as nursery:
        for name in options.kinds:
            recipe, plans = KINDS[name]
            took: dict[str, list[float]] = {plan: [] for plan in plans}
            for _ in range(options.rounds):
                for plan in plans:
                    seen = played(nursery, recipe, Plan.parse(plan).world, plan, (), options.seconds)
                    took[plan].append(seen[0]["parts"]["step"])
            step = {plan: statistics.median(took[plan]) for plan in plans}
            ranks = {plan: Plan.parse(plan).world for plan in plans}
            told = {
                plan: priced(recipe, plan, ranks[plan], between(base, ranks[plan], 0.0))[0] for plan in plans
            }
            for plan in plans:
                errors.append(told[plan] / step[plan] - 1.0)
                turns = " ".join(f"{1e3 * one:.1f}" for one in took[plan])
                print(f"{name:<9}{plan:<16}{1e3 * step[plan]:>9.1f}{1e3 * told[plan]:>9.1f}{100 * errors[-1]:>+7.1f}%"
                      f"  {turns}")  # fmt: skip
            chosen, best = min(plans, key=told.__getitem__), min(plans, key=step.__getitem__)
            # Of one turn with itself: what else the machine does changes from turn to turn.
            regret = statistics.median(a / b for a, b in zip(took[chosen], took[best], strict=True)) - 1.0
            worst = max(worst, regret)
            print(f"{name:<9}chosen {chosen}, best {best}: {100 * regret:.1f} % above it", flush=True)
    print(f"mean error {100 * statistics.fmean(map(abs, errors)):.1f} %")
    return 0 if worst <= REGRET_LIMIT else 1


def calibrated() -> Cluster:
    """This machine as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, "here.toml")
        calibrate.run(here, lambda text: print(text, file=sys.stderr))
        return cluster(str(here))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="a file of `unisono calibrate` (measured before each link)"
    )
    parser.add_argument(
        "--links",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="MBIT",
        help="over these; 0: loopback (default)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=PLANS, default=list(PLANS))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="these instead, four plans each, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of --kinds (default 5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of steps, per plan (default 1.5)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    return parser.parse_args()


def played(
    nursery: ForkServer, recipe: Recipe, ranks: int, plan: str, hosts: tuple[str, ...], seconds: float
) -> list[dict[str, Any]]:
    """What every rank saw of one plan (see `truth_rank`), played for so many seconds of steps."""
    argument = {
        "recipe": recipe.model_dump_json(exclude_unset=True), "plan": plan, "hosts": list(hosts), "seconds": seconds,
    }  # fmt: skip
    outcome = nursery.run(argument, ranks, 1, timeout=300.0, backend="gloo")
    if outcome.error is not None:
        raise SystemExit(f"{plan}: {outcome.error.render()}")
    return [result for result in outcome.results if result is not None]


def row(
    nursery: ForkServer, base: Cluster, megabits: float, hosts: tuple[str, ...], name: str, ranks: int, plan: str,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """One plan, played and priced."""
    recipe = MODELS[name]
    results = played(nursery, recipe, ranks, plan, hosts, options.seconds)
    step, memory = priced(recipe, plan, ranks, between(base, ranks, megabits))
    return {
        "link": megabits, "model": name, "ranks": ranks, "plan": plan, "parts": results[0]["parts"],
        "step": results[0]["parts"]["step"], "step_priced": step,
        "memory": max(result["peak"] for result in results), "memory_priced": memory,
    }  # fmt: skip


def between(base: Cluster, ranks: int, megabits: float) -> Cluster:
    """This machine with so many ranks, or two of it with a link between them."""
    here = of_ranks(base, ranks)
    if not megabits:
        return here
    inside = replace(here.links[0], size=ranks // 2)
    wire = Link("wire", ranks, megabits * 1e6 / 8 / (ranks // 2), 1e-4)
    return replace(here, links=(inside, wire), in_node=ranks // 2)


def priced(recipe: Recipe, plan: str, ranks: int, where: Cluster) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest rank)."""
    resolved = resolve(recipe, plan, ranks)
    model = model_of(Loaded(recipe, Plan(), {}), {})
    batch, software = resolved.batch, stack(where.stack)
    got = simulate(PlanRequest(model, resolved.plan, where, software, batch.micro_batch, batch.micros))
    return got.price.step, got.verdict.memory.total + where.device.reserved


def line_of(row: dict[str, Any]) -> str:
    link = f"{row['link']:.0f} Mbit/s" if row["link"] else "loopback"
    step, memory = (row[f"{what}_priced"] / row[what] - 1.0 for what in ("step", "memory"))
    return (
        f"{link:<12}{row['model']:<7}{row['plan']:<31}{row['step'] * 1e3:>9.1f}{row['step_priced'] * 1e3:>9.1f}"
        f"{100 * step:>+7.1f}%{row['memory'] / 2**20:>7.0f}{row['memory_priced'] / 2**20:>7.0f}{100 * memory:>+7.1f}%"
    )


def summed(rows: list[dict[str, Any]], file: str | None) -> int:
    """The mean errors; how much longer the plan takes that the prices would have chosen."""
    print()
    means = {}
    for what in ("step", "memory"):
        errors = sorted(abs(one[f"{what}_priced"] / one[what] - 1.0) for one in rows)
        means[what] = statistics.fmean(errors)
        print(
            f"{what:<7} {len(rows)} plans: mean error {100 * means[what]:.1f} %, median"
            f" {100 * statistics.median(errors):.1f} %, greatest {100 * errors[-1]:.1f} %"
        )
    for key in dict.fromkeys((one["link"], one["model"], one["ranks"]) for one in rows):
        own = [one for one in rows if (one["link"], one["model"], one["ranks"]) == key]
        chosen, best = min(own, key=lambda one: one["step_priced"]), min(own, key=lambda one: one["step"])
        more = chosen["step"] / best["step"] - 1.0
        link = f"{key[0]:.0f} Mbit/s" if key[0] else "loopback"
        print(
            f"chosen  {link:<12} {key[1]:<4} {key[2]} ranks: {chosen['plan']}, {100 * more:.1f} % above the best"
        )
    if file:
        Path(file).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
