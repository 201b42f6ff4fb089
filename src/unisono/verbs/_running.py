"""The verbs that run something. Each imports what it needs when it runs; errors in the recipe come before torch."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.verbs._call import Call, Parser, Verb, colour, common, found_run
from unisono.verbs._planner import VERBS as PLANNER
from unisono.verbs._recipe import loaded, recipe_parser

if TYPE_CHECKING:
    from unisono.config import Resolved

LATER = {
    "bench": "measure this machine, beside its peers",
    "dash": "watch a run in the browser",
    "launch": "start a run on slurm, k8s, ray or over ssh",
    "sweep": "search over values of a recipe",
}


def started_ranks(call: Call) -> int | None:
    """The world that torchrun, Slurm or the like has started already; None when nobody has. Raises UsageError."""
    from unisono.launch import env

    place = env.detect(call.environ)
    return None if place is None else place.world


# --- train -----------------------------------------------------------------------------------------------------------


def _train_parser() -> Parser:
    parser = recipe_parser("train", "Trains a recipe under a plan.")
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
        from unisono.verbs.train import auto

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
    from unisono.verbs.train import run as train

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
    parser = recipe_parser(
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
    from unisono.verbs import _verify as verify

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
    from unisono.verify import replayer as replay

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
    *PLANNER,
    *(_later(name) for name in LATER),
)
