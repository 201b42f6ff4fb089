"""`unisono scale FILE --ranks 1,2,4`."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError, UserCodeError
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded

if TYPE_CHECKING:
    from unisono.config import Loaded
    from unisono_contrib.report.growth import GrowthPoint

_STEPS, _GRACE = 24, 5.0


class ScaleVerb(RecipeVerb):
    """Run a recipe shortly on several numbers of ranks: speed-up, efficiency, what limits each, what to change.

    Strong scaling keeps the recipe's global batch, weak scaling the samples of a rank. Ranks are added on dp; the
    other axes of the plan stay as they are. The runs do not validate, save or report, and are gone afterwards, unless
    --out names a folder for them.
    """

    name = "scale"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument(
            "--plan", metavar="PLAN", help='all but dp of how it is spread: "tp=2 codec=int8"'
        )
        parser.add_argument(
            "--ranks", type=_sizes, default=[1, 2, 4], metavar="LIST", help="numbers of ranks (1,2,4)"
        )
        parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"of each run ({_STEPS})")
        parser.add_argument(
            "--kind", choices=("both", "strong", "weak"), default="both", help="of scaling (both)"
        )
        parser.add_argument(
            "--noise-scale", type=float, metavar="B", help="gradient noise scale in samples (measured)"
        )
        parser.add_argument("--out", metavar="FOLDER", help="where the runs are kept (nowhere)")

    def run(self, call: CommandCall) -> Result:
        args, settings = call.args, call.settings
        if args.steps < 1:
            raise UsageError(
                f"--steps {args.steps} is no number of steps", where="--steps", fix="--steps 24", code="C04"
            )
        jobs = list(_jobs(call))
        if settings.dry_run:
            facts = [{"ranks": n, "kind": kind, "plan": str(got.plan), "global_batch": got.recipe.train.global_batch}
                     for n, kind, got in jobs]  # fmt: skip
            said = [
                f"would run  {f['kind']:6} {f['ranks']:3} ranks  {f['plan']}  batch {f['global_batch']}"
                for f in facts
            ]
            return call.would({"points": facts, "steps": args.steps}, *said)
        if args.out:
            return _scaled(call, jobs, Path(args.out))
        with tempfile.TemporaryDirectory(prefix="unisono-scale-") as folder:
            return _scaled(call, jobs, Path(folder))


def _sizes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and 0 < int(word) <= 4096 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks, such as 1,2,4")
    return sorted(set(map(int, words)))


def _jobs(call: CommandCall) -> Iterator[tuple[int, str, "Loaded"]]:
    """(ranks, kind, recipe) of each run. Raises ConfigProblems, and UsageError for a size that the plan cannot fill."""
    args = call.args
    keys = [("train.steps", str(args.steps)), ("train.eval_every", "0"), ("train.save_every", "0"),
            ("out.report", "false"), ("launch.replan", "false")]  # fmt: skip
    if args.plan is not None:
        keys.append(("plan", args.plan))
    base = loaded(call, args.file, keys=keys, demo=args.demo)
    inner, batch = base.plan.inner, base.recipe.train.global_batch
    kinds = ("strong", "weak") if args.kind == "both" else (args.kind,)
    for kind in kinds:
        for ranks in args.ranks:
            if ranks % inner:
                raise UsageError(
                    f"{ranks} ranks are no multiple of the {inner} of a replica", where="--ranks",
                    fix=f"--ranks {inner},{2 * inner},{4 * inner}", code="C04",
                )  # fmt: skip
            size = batch * ranks // args.ranks[0] if kind == "weak" else batch
            train = base.recipe.train.model_copy(
                update={"global_batch": size, "micro_batch": _micro(base, ranks, size)}
            )
            plan = replace(base.plan, dp=ranks // inner)
            yield (
                ranks,
                kind,
                replace(
                    base, recipe=base.recipe.model_copy(update={"train": train, "plan": str(plan)}), plan=plan
                ),
            )


def _micro(base: "Loaded", ranks: int, batch: int) -> int | None:
    """The recipe's micro-batch where a rank has as many samples; else all of the rank's in one, or what micros says."""
    size, replicas = base.recipe.train.micro_batch, ranks // base.plan.inner * base.plan.shard
    if base.plan.micros is not None:
        return None
    mine = batch // replicas
    return size if size is not None and mine % size == 0 else mine


def _scaled(call: CommandCall, jobs: Sequence[tuple[int, str, "Loaded"]], folder: Path) -> Result:
    from unisono_contrib.report import growth

    points = []
    for ranks, kind, got in jobs:
        call.settings.note(f"{kind} scaling, {ranks} ranks, batch {got.recipe.train.global_batch} ...")
        points.append(_point(call, ranks, kind, got, folder / f"{kind}-{ranks}"))
    table = growth.rows(points)
    if not any(point.rate for point in points):
        raise UserCodeError(
            "no run came to an end",
            likely=points[0].why,
            code="R04",
            fix="unisono train with the same recipe",
        )
    noise, why = _noise(call, jobs, folder)
    lines = growth.advice(points, noise, why)
    for line in (*growth.said(table), *lines):
        call.settings.say(line)
    return {"points": table, "advice": lines, "noise_scale": noise, "steps": call.args.steps}


def _trained(call: CommandCall, got: "Loaded", folder: Path) -> tuple[str, str]:
    """(the run's folder, "") or ("", why it came to nothing)."""
    from unisono.config.write import recipe_toml
    from unisono.observe.files import write_whole
    from unisono_contrib.sweep import trial

    folder.mkdir(parents=True, exist_ok=True)
    out = got.recipe.out.model_copy(update={"dir": str(folder)})
    recipe = got.recipe.model_copy(update={"out": out, "name": "run"})
    write_whole(
        folder / trial.RECIPE, recipe_toml(recipe, dict(got.origins), [f"# of unisono scale, {got.plan}"])
    )
    job = trial.TrialJob(0, str(folder), 0, "loss", _GRACE, trial.variables(call.environ))
    process = trial.start(job)
    with trial.ending({0: process}, _GRACE):
        outcome = process.wait()
    if outcome is None or not outcome.run_dir:
        return "", outcome.why if outcome is not None else "it did not end"
    return outcome.run_dir, ""


def _point(call: CommandCall, ranks: int, kind: str, got: "Loaded", folder: Path) -> "GrowthPoint":
    from unisono.report.collect import collect
    from unisono.report.verdict.gather import gather
    from unisono.report.verdict.judge import judge
    from unisono.verbs._prices import prices_of
    from unisono_contrib.report import growth

    batch = got.recipe.train.global_batch
    run_dir, why = _trained(call, got, folder)
    if why:
        return growth.GrowthPoint(ranks, kind, batch, why=why)
    evidence = gather(collect(run_dir))
    verdict = judge(evidence, prices_of(Path(run_dir), call.environ))
    return growth.seen(ranks, kind, batch, evidence, verdict, run_dir if call.args.out else "")


def _noise(
    call: CommandCall, jobs: Sequence[tuple[int, str, "Loaded"]], folder: Path
) -> tuple[float | None, str]:
    """(the gradient noise scale in samples, "") as asked, or of one more run of the largest size; else (None, why)."""
    from unisono.observe.metrics import read_steps
    from unisono.spec.words import is_number

    if call.args.noise_scale is not None:
        return call.args.noise_scale, ""
    ranks, _, _ = max(jobs, key=lambda job: job[0])
    keys = [("noise_scale.smoothing", "0.9")]
    again: Any = replace(call, keys=[*call.keys, *keys])
    got = next(got for n, _, got in _jobs(again) if n == ranks)
    call.settings.note(f"noise scale, {ranks} ranks ...")
    run_dir, why = _trained(call, got, folder / "noise")
    if why:
        return None, why
    steps, _ = read_steps(Path(run_dir, "metrics.jsonl"))
    values = [line["noise_scale"] for line in steps if is_number(line.get("noise_scale"))]
    return (values[-1], "") if values else (None, f"noise hides the signal in {call.args.steps} steps")
