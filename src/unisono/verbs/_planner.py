"""The verbs of the planner: simulate, plan, calibrate. Each imports what it needs when it runs."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.verbs._call import Call, Parser, Verb, colour, common
from unisono.verbs._recipe import loaded, recipe_parser
from unisono.verbs._studies_flags import add as add_studies

# --- simulate --------------------------------------------------------------------------------------------------------


def _simulate_parser() -> Parser:
    parser = recipe_parser("simulate", "Prices one plan on a cluster: time, bytes, memory; nothing is run.")
    parser.add_argument("--plan", metavar="PLAN", help='how it is spread, for example "dp=8 tp=8 pp=16"')
    parser.add_argument(
        "--cluster",
        metavar="C",
        default="laptop",
        help="dgx-a100:64 (nodes after the colon), A:8+B:16, or FILE.toml",
    )
    parser.add_argument("--stack", metavar="S", help="whose software's constants (the cluster's own)")
    parser.add_argument(
        "--out", metavar="PATH",
        help="draw waterfall and timeline, or a sweep: FILE.html, FILE.png, or a folder for both",
    )  # fmt: skip
    parser.add_argument(
        "--order", metavar="AXES",
        help="which axis lies innermost: tp,shard,dp,pp is what train plays; best: all orders",
    )  # fmt: skip
    parser.add_argument(
        "--blocks", action="store_true",
        help="the model part by part: parameters, FLOPs, bytes kept and bytes sent",
    )  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="the simulated step for Perfetto: .json or .json.gz")
    add_studies(parser)
    return parser


def _simulate(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config

    flags, rest = config.split_flags(words)
    given = _simulate_parser().read(rest)
    got = loaded(call, given.file, given.demo, flags)
    from unisono.planner.pools import is_mixture
    from unisono.verbs import _simulate as simulate
    from unisono.verbs import _studies as studies

    if is_mixture(given.cluster):
        return _on_mixture(call, got, given)
    if (given.sweep or given.networks == "best") and given.dry_run:
        call.say(f"would sweep  {given.sweep or 'networks'}  on {given.cluster}")
        return {"dry_run": True, "cluster": given.cluster, "sweep": given.sweep, "networks": given.networks}
    if (study := studies.many(got, given)) is not None:
        call.say(study[1])
        return study[0]
    ask = simulate.question(got, given.cluster, given.stack, given.order)
    if given.dry_run:
        call.say(f"would price  {ask.plan}  on {ask.cluster.name} with {ask.stack.name}")
        return {"dry_run": True, "plan": str(ask.plan), "cluster": ask.cluster.name, "stack": ask.stack.name}
    result, page = simulate.run(ask, given)
    call.say(page)
    return result


def _on_mixture(call: Call, got: Any, given: Any) -> Mapping[str, Any]:
    from unisono.verbs import _mixed as mixed

    ask = mixed.question(got, given)
    if given.dry_run:
        call.say(f"would price  {ask.plan}  on {ask.mixture.name} with {ask.stack.name}")
        return {"dry_run": True, "plan": str(ask.plan), "cluster": ask.mixture.name, "stack": ask.stack.name}
    result, page = mixed.simulate(ask)
    call.say(page)
    return result


# --- plan ------------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _plan_parser() -> Parser:
    parser = recipe_parser(
        "plan", "Prices all plans that train can play on a cluster, and says why one is best."
    )
    parser.add_argument("--cluster", metavar="C", help="dgx-a100:64, A:8+B:16, or FILE.toml (laptop)")
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
    parser.add_argument(
        "--any-fidelity", action="store_true",
        help="beside these the best of other precisions, policies and codecs: what exactness costs",
    )  # fmt: skip
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
    from unisono.planner.pools import is_mixture
    from unisono.verbs import _plan as plan

    given.cluster = given.cluster or (_calibrated(call) if given.check else "laptop")
    if is_mixture(given.cluster):
        return _plan_mixture(call, got, given)
    within = plan.space(got, given.plan, given.cluster, given.stack, given.all_keys and not given.check)
    if given.dry_run:
        call.say(f"would search  {within.cluster.name} with {within.stack.name}")
        return {"dry_run": True, "cluster": within.cluster.name, "stack": within.stack.name}
    if given.check:
        from unisono.measure import check

        check.played_here(within)
    wider = None
    if given.any_fidelity:
        if given.objective != "time":
            raise UsageError(
                "--any-fidelity asks what exactness costs in time", where="--any-fidelity, --objective",
                fix="without --objective memory", code="C04",
            )  # fmt: skip
        wider = plan.space(got, given.plan, given.cluster, given.stack, within.all_keys, priced=True)
    result, page = plan.run(within, given.cluster, given.top, given.objective, given.fewer, wider)
    call.say(page)
    if given.check:
        from unisono.measure import check

        more, page = check.run(got, within, given.top)
        call.say(f"\n{page}")
        return {**result, **more}
    return result


def _plan_mixture(call: Call, got: Any, given: Any) -> Mapping[str, Any]:
    from unisono.verbs import _mixed as mixed

    within, where = mixed.space(got, given)
    if given.dry_run:
        call.say(f"would search  {where.name} with {within.stack.name}")
        return {"dry_run": True, "cluster": where.name, "stack": within.stack.name}
    result, page = mixed.plan(within, where, given.top)
    call.say(page)
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
    from unisono.measure import calibrate

    result = calibrate.run(out, call.note)
    call.say(str(out))
    return result


VERBS = (
    Verb("simulate", "price one plan on a cluster: time, bytes, memory", _simulate_parser, _simulate),
    Verb("plan", "rank the plans for a cluster, and say why", _plan_parser, _plan),
    Verb("calibrate", "measure this machine, for plan and simulate", _calibrate_parser, _calibrate),
)
