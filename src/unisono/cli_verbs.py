"""The verbs that run something. Each imports what it needs when it runs; errors in the recipe come before torch."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli_call import Call, Parser, Verb, colour, common, found_run
from unisono.cli_studies import add as add_studies
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from unisono.config import Loaded, Resolved

_KEYS = "any key of the recipe can be set: --train.steps 100, --model.n_layer=8, --no-train.fused\n"\
    "all keys with their values: unisono config show"  # fmt: skip
LATER = {
    "bench": "measure this machine, beside its peers",
    "dash": "watch a run in the browser",
    "launch": "start a run on slurm, k8s, ray or over ssh",
    "sweep": "search over values of a recipe",
}


def _recipe_parser(prog: str, about: str) -> Parser:
    parser = common(Parser(prog=f"unisono {prog}", description=about, epilog=_KEYS))
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="recipe: FILE.toml, FILE.py:FUNCTION or a run folder"
    )
    parser.add_argument("--demo", action="store_true", help="the built-in recipe: a small GPT on 4 processes")
    return parser


def loaded(call: Call, file: str | None, demo: bool, flags: Sequence[tuple[str, str | None]]) -> "Loaded":
    """Recipe and plan as given by file or demo, variables and flags. Raises ConfigProblems."""
    from unisono import config

    if not demo:
        return config.load(file, flags, environ=call.environ)
    if file is not None:
        raise UsageError(
            f"--demo is a recipe, and so is {file}", where="unisono", fix="one of them", code="C04"
        )
    from unisono.recipes.demo import demo as recipe

    return config.load(None, flags, environ=call.environ, base=recipe(), base_origin="recipes/demo.py")


def started_ranks(call: Call) -> int | None:
    """The world that torchrun, Slurm or the like has started already; None when nobody has. Raises UsageError."""
    from unisono.launch import env

    place = env.detect(call.environ)
    return None if place is None else place.world


# --- train -----------------------------------------------------------------------------------------------------------


def _train_parser() -> Parser:
    parser = _recipe_parser("train", "Trains a recipe under a plan.")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    parser.add_argument("--plan", metavar="PLAN", help='how it is spread, for example "dp=2 pp=2", or auto')
    parser.add_argument(
        "--guard", nargs="?", const="200", metavar="N",
        help="every N steps (200), check that replicas agree: --train.guard N",
    )  # fmt: skip
    return parser


def _train(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config

    flags, rest = config.split_flags(words)
    given = _train_parser().read(rest)
    file = given.file
    if given.guard is not None:
        flags = [*flags, ("train.guard", given.guard)]
    if given.resume is not None:
        run = found_run(given.resume)
        given.resume = str(run)
        if file is None and not given.demo:
            file = str(run / "config.resolved.toml")
    got = loaded(call, file, given.demo, flags)
    if got.plan.auto:
        from unisono.commands import auto

        got, said = auto.choose(got, started_ranks(call), call.environ)
        for line in said:
            call.note(line)
    resolved = config.resolve(got.recipe, got.plan, started_ranks(call), got.origins)
    text = config.resolved_toml(resolved)
    if given.dry_run:
        return _would_train(call, resolved, text, given.resume)
    call.options.update(
        resume=given.resume, json=given.json, quiet=given.quiet, color=colour(call), dry_run=False, demo=given.demo,
        config_text=text, command=["unisono", *map(shlex.quote, call.words)],
    )  # fmt: skip
    from unisono.commands import train

    return train.run(resolved.recipe, resolved.plan, dict(resolved.origins), call.options)


def _would_train(call: Call, resolved: "Resolved", text: str, resume: str | None) -> Mapping[str, Any]:
    from unisono.config import as_json

    plan, batch = resolved.plan, resolved.batch
    call.say(text)
    call.say(f"would train  {resolved.recipe.name}, {resolved.recipe.train.steps} steps")
    call.say(f"plan         {plan}")
    call.say(f"batch        {batch}")
    call.say(f"ranks        {plan.world}")
    call.say(f"out          {Path(resolved.recipe.out.dir, resolved.recipe.name)}")
    if resume:
        call.say(f"resume       {resume}")
    sums = {k: getattr(batch, k) for k in ("global_batch", "micro_batch", "micros", "replicas")}
    return {
        "dry_run": True, "plan": str(plan), "ranks": plan.world, "batch": sums, "resume": resume,
        "recipe": as_json(resolved.recipe), "origins": resolved.origins,
    }  # fmt: skip


# --- verify ----------------------------------------------------------------------------------------------------------


def _verify_parser() -> Parser:
    parser = _recipe_parser(
        "verify", "Proves plans against one device: loss, gradients, parameters, optimiser state."
    )
    parser.add_argument(
        "--plan", action="append", default=[], metavar="PLAN", help="a plan to prove; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="every plan that fits the recipe on up to 8 ranks")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimiser steps to compare (3)")
    parser.add_argument("--dtype", choices=("float32", "float64"), help="float64 leaves no room for luck")
    parser.add_argument("--replay", metavar="RUN", help="a step of this run once more, on one process")
    parser.add_argument("--step", type=int, metavar="N", help="with --replay: which step (the last one)")
    return parser


def _verify(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config
    from unisono.config.resolve import on_any_ranks
    from unisono.plan import Plan

    flags, rest = config.split_flags(words, top=("name", "seed"))
    given = _verify_parser().read(rest)
    if given.replay is not None or given.step is not None:
        return _replay(call, given, flags)
    if given.steps < 1:
        raise UsageError(f"--steps {given.steps}: at least one step", where="unisono verify", fix="--steps 3")
    if given.dtype:
        flags = [*flags, ("train.dtype", given.dtype)]
    if given.plan or given.all:
        flags = [*flags, ("plan", "dp=1")]  # the recipe's own plan is not asked about
    got = loaded(call, given.file, given.demo, flags)
    wanted = [Plan.parse(text, where="flag --plan") for text in given.plan]
    wanted = wanted or ([] if given.all else [got.plan])
    recipe = on_any_ranks(got.recipe)
    plans = [config.resolve(recipe, plan, None, got.origins).plan for plan in wanted]
    if given.dry_run:
        for plan in plans:
            call.say(
                f"would verify  {plan}  on {plan.world} ranks, {given.steps} steps, {recipe.train.dtype}"
            )
        return {"dry_run": True, "plans": [str(p) for p in plans], "all": given.all, "steps": given.steps}
    call.options.update(
        steps=given.steps, dtype=recipe.train.dtype, all=given.all, json=given.json, quiet=given.quiet,
        color=colour(call), demo=given.demo,
    )  # fmt: skip
    from unisono.commands import verify

    return verify.run(recipe, plans, call.options)


def _replay(call: Call, given: Any, flags: Sequence[tuple[str, str | None]]) -> Mapping[str, Any] | None:
    if given.replay is None or given.plan or given.all or given.file or given.demo or given.dtype or flags:
        raise UsageError(
            "--replay RUN --step N takes a run as it was: no recipe, plan or key beside it",
            where="unisono verify",
            fix="unisono verify --replay RUN --step N",
            code="C04",
        )
    run = found_run(given.replay)
    if given.dry_run:
        call.say(f"would replay  {run}, {'the last step' if given.step is None else f'step {given.step}'}")
        return {"dry_run": True, "run_dir": str(run), "step": given.step}
    call.options.update(json=given.json, quiet=given.quiet, color=colour(call))
    from unisono.commands import replay

    return replay.run(run, given.step, call.options)


# --- doctor, report, export ------------------------------------------------------------------------------------------


def _doctor_parser() -> Parser:
    parser = common(Parser(prog="unisono doctor", description="Looks over this machine and says what to do."))
    parser.add_argument(
        "what", nargs="*", metavar="hang RUN", help="(not yet in this version: look into a hang)"
    )
    return parser


def _doctor(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    given = _doctor_parser().read(words)
    if given.what[:1] == ["hang"]:
        raise not_yet("doctor hang")
    if given.what:
        raise UsageError(
            f"unknown argument {given.what[0]}", where="unisono doctor", fix="unisono doctor", code="C04"
        )
    if given.dry_run:
        call.say(
            "would look at: Python, torch, cores, memory, disk, loopback, port, two-rank all-reduce, clock"
        )
        return {"dry_run": True}
    call.options.update(json=given.json, quiet=given.quiet, color=colour(call))
    from unisono.launch import doctor

    return doctor.run(call.options)


def _report_parser() -> Parser:
    parser = common(
        Parser(prog="unisono report", description="Draws a run: report.html and report.png in its folder.")
    )
    parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
    return parser


def _report(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    given = _report_parser().read(words)
    run = found_run(given.run)
    if given.dry_run:
        call.say(f"would write {run / 'report.html'} and {run / 'report.png'}")
        return {"dry_run": True, "run_dir": str(run)}
    call.options.update(json=given.json, quiet=given.quiet, color=colour(call))
    from unisono.report import command

    result = command.run(run, call.options)
    call.say(f"{result['report_html']}  (and report.png)")
    call.say(result["verdict"])
    return result


def _export_parser() -> Parser:
    parser = common(Parser(prog="unisono export", description="Writes a run's weights for other programs."))
    parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
    parser.add_argument(
        "--to", choices=("hf",), default="hf", help="hf: safetensors and config for transformers"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write (RUN/export-hf)")
    return parser


def _export(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    given = _export_parser().read(words)
    run = found_run(given.run)
    out = Path(given.out) if given.out else run / f"export-{given.to}"
    if given.dry_run:
        call.say(f"would write {out}")
        return {"dry_run": True, "run_dir": str(run), "out": str(out)}
    call.options.update(json=given.json, quiet=given.quiet, color=colour(call))
    from unisono.train import export

    result = export.run(run, to=given.to, out=out, options=call.options)
    call.say(f"{out}")
    return result


# --- simulate --------------------------------------------------------------------------------------------------------


def _simulate_parser() -> Parser:
    parser = _recipe_parser("simulate", "Prices one plan on a cluster: time, bytes, memory; nothing is run.")
    parser.add_argument("--plan", metavar="PLAN", help='how it is spread, for example "dp=8 tp=8 pp=16"')
    parser.add_argument(
        "--cluster", metavar="C", default="laptop", help="dgx-a100:64 (nodes after the colon) or FILE.toml"
    )
    parser.add_argument("--stack", metavar="S", help="whose software's constants (the cluster's own)")
    parser.add_argument(
        "--out", metavar="PATH",
        help="draw waterfall and timeline, or a sweep: FILE.html, FILE.png, or a folder for both",
    )  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="the simulated step for Perfetto: .json or .json.gz")
    add_studies(parser)
    return parser


def _simulate(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config

    flags, rest = config.split_flags(words)
    given = _simulate_parser().read(rest)
    got = loaded(call, given.file, given.demo, flags)
    from unisono.commands import simulate, studies

    if (given.sweep or given.networks == "best") and given.dry_run:
        call.say(f"would sweep  {given.sweep or 'networks'}  on {given.cluster}")
        return {"dry_run": True, "cluster": given.cluster, "sweep": given.sweep, "networks": given.networks}
    if (study := studies.many(got, given)) is not None:
        call.say(study[1])
        return study[0]
    ask = simulate.question(got, given.cluster, given.stack)
    if given.dry_run:
        call.say(f"would price  {ask.plan}  on {ask.cluster.name} with {ask.stack.name}")
        return {"dry_run": True, "plan": str(ask.plan), "cluster": ask.cluster.name, "stack": ask.stack.name}
    result, page = simulate.run(ask, given)
    call.say(page)
    return result


# --- plan ------------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _plan_parser() -> Parser:
    parser = _recipe_parser(
        "plan", "Prices all plans that train can play on a cluster, and says why one is best."
    )
    parser.add_argument("--cluster", metavar="C", help="dgx-a100:64, or FILE.toml (laptop)")
    parser.add_argument(
        "--check", action="store_true",
        help="play the best for some steps here: needs unisono calibrate, or --cluster for this machine",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="KEYS", help='keys to hold, for example "tp=8 precision=bf16"')
    parser.add_argument(
        "--all-keys", action="store_true", help="also what train cannot play yet, only priced"
    )
    parser.add_argument(
        "--fewer", action="store_true", help="the front over a half, a quarter ... of the nodes too"
    )
    parser.add_argument("--top", metavar="K", type=_count, default=4, help="how many to show (default 4)")
    parser.add_argument(
        "--objective", choices=("time", "memory"), default="time", help="what is best (default time)"
    )
    parser.add_argument("--stack", metavar="S", help="whose software's constants (the cluster's own)")
    return parser


def _plan(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config

    flags, rest = config.split_flags(words, top=("name", "seed"))
    given = _plan_parser().read(rest)
    got = loaded(call, given.file, given.demo, flags)
    from unisono.commands import plan

    given.cluster = given.cluster or (_calibrated(call) if given.check else "laptop")
    within = plan.space(got, given.plan, given.cluster, given.stack, given.all_keys and not given.check)
    if given.dry_run:
        call.say(f"would search  {within.cluster.name} with {within.stack.name}")
        return {"dry_run": True, "cluster": within.cluster.name, "stack": within.stack.name}
    result, page = plan.run(within, given.cluster, given.top, given.objective, given.fewer)
    call.say(page)
    if given.check:
        from unisono.commands import check

        more, page = check.run(got, within, given.top)
        call.say(f"\n{page}")
        return {**result, **more}
    return result


def _calibrated(call: Call) -> str:
    """This machine's own cluster file. Raises UsageError where nobody has measured it."""
    from unisono.planner.predict import calibration

    path = calibration(call.environ)
    if not path.is_file():
        raise UsageError(
            "--check needs this machine in numbers",
            where="unisono plan",
            fix="unisono calibrate, once",
            code="P19",
        )
    return str(path)


# --- calibrate -------------------------------------------------------------------------------------------------------


def _calibrate_parser() -> Parser:
    about = "Measures this machine in less than two minutes, for plan, simulate, plan=auto and reports."
    parser = common(Parser(prog="unisono calibrate", description=about))
    parser.add_argument(
        "--out", metavar="FILE", help="where to write it (~/.cache/unisono/cluster.toml, where all look)"
    )
    return parser


def _calibrate(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono.planner.predict import calibration

    given = _calibrate_parser().read(words)
    out = Path(given.out) if given.out else calibration(call.environ)
    if given.dry_run:
        call.say(f"would measure this machine and write {out}")
        return {"dry_run": True, "file": str(out)}
    call.options.update(json=given.json, quiet=given.quiet, color=colour(call))
    from unisono.commands import calibrate

    result = calibrate.run(out, call.note)
    call.say(str(out))
    return result


# --- later -----------------------------------------------------------------------------------------------------------


def not_yet(verb: str) -> UsageError:
    """The answer to what the contract names and this version lacks."""
    here = " ".join(v.name for v in VERBS if v.name not in LATER)
    return UsageError(
        f"{verb} is not yet in this version",
        where=f"unisono {verb}",
        fix=f"verbs that are here: {here} config",
        code="C10",
    )


def _later(name: str) -> Verb:
    about = f"{LATER[name]} (not yet in this version)"

    def parser() -> Parser:
        return common(Parser(prog=f"unisono {name}", description=about))

    def run(call: Call, words: list[str]) -> Mapping[str, Any] | None:
        raise not_yet(name)

    return Verb(name, about, parser, run)


VERBS = (
    Verb("train", "train a recipe under a plan", _train_parser, _train),
    Verb("verify", "prove plans against one device", _verify_parser, _verify, failed=3),
    Verb("report", "draw where a run's time and bytes went", _report_parser, _report),
    Verb("doctor", "look over this machine", _doctor_parser, _doctor, failed=4),
    Verb("export", "write a run's weights for other programs", _export_parser, _export),
    Verb("simulate", "price one plan on a cluster: time, bytes, memory", _simulate_parser, _simulate),
    Verb("plan", "rank the plans for a cluster, and say why", _plan_parser, _plan),
    Verb("calibrate", "measure this machine, for plan and simulate", _calibrate_parser, _calibrate),
    *(_later(name) for name in LATER),
)
