"""`unisono verify`: plans proved against one device, or a recorded step replayed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.observe.files import write_whole
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.finder import contributed
from unisono.spec.runs import PROOF, run_folder
from unisono.spec.words import relative_error
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded

if TYPE_CHECKING:
    from unisono.config import Recipe, Resolved
    from unisono.plan import Plan
    from unisono.verify.prover import Proof


class VerifyVerb(RecipeVerb):
    """Prove plans against one device: loss, gradients, parameters, optimiser state."""

    name = "verify"
    failed = 3
    top = ("name", "seed")

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument(
            "--plan", action="append", default=[], metavar="PLAN", help="a plan to prove; may be repeated"
        )
        parser.add_argument(
            "--all", action="store_true", help="every plan that fits the recipe on up to 8 ranks"
        )
        parser.add_argument(
            "--steps", type=int, default=3, metavar="N", help="optimiser steps to compare (3)"
        )
        parser.add_argument("--dtype", choices=("float32", "float64"), help="float64 leaves no room for luck")
        parser.add_argument(
            "--conformance",
            action="append",
            default=[],
            metavar="NAME",
            help="a member of a family, ours or mine.py:NAME, held to what its family owes",
        )
        parser.add_argument(
            "--static", action="store_true",
            help="check the operations of all ranks for partners and deadlock, on any number of them, playing none",
        )  # fmt: skip
        parser.add_argument(
            "--witness", action="append", default=[], metavar="NAME",
            help="one device by an engine without torch as well: numpy, jax",
        )  # fmt: skip
        parser.add_argument(
            "--engine", action="append", default=[], metavar="NAME",
            help="one device and the plans by another engine as well: jax, or jax:processes=true",
        )  # fmt: skip
        parser.add_argument(
            "--fuzz", type=int, metavar="N",
            help="at least N plans and recipes drawn from --seed, in float64; what is wrong is shrunk",
        )  # fmt: skip
        parser.add_argument(
            "--stack", metavar="STACKS",
            help='with --fuzz: steps drawn for other stacks, "ddp,fsdp2"; alone: one step, "ddp micros=2 model=gpt"',
        )  # fmt: skip
        parser.add_argument("--replay", metavar="RUN", help="a step of this run once more, on one process")
        parser.add_argument("--step", type=int, metavar="N", help="with --replay: which step (the last one)")

    def run(self, call: CommandCall) -> Result:
        from unisono import config
        from unisono.config.resolve import on_any_ranks

        args = call.args
        if args.conformance:
            return _conform(call)
        if args.replay is not None or args.step is not None:
            return _replay(call)
        if args.fuzz is not None or args.stack is not None:
            return contributed("unisono.verbs._fuzz").run(call)
        if args.steps < 1:
            raise UsageError(
                f"--steps {args.steps}: at least one step", where="unisono verify", fix="--steps 3"
            )
        beside = bool(args.witness or args.engine)
        if beside and args.static:
            what = "--static compares no numbers, which --witness and --engine do"
            raise UsageError(what, where="unisono verify", fix="leave --static out")
        dtype = args.dtype or ("float64" if beside else None)
        keys = [("train.dtype", dtype)] if dtype else []
        if args.plan or args.all:
            keys += [("plan", "dp=1")]  # the recipe's own plan is not asked about
        recipe_given = loaded(call, args.file, keys=keys, demo=args.demo)
        recipe = on_any_ranks(recipe_given.recipe)
        plans, refused = _accepted(
            args.plan, lambda plan: config.resolve(recipe, plan, None, recipe_given.origins)
        )
        if not args.plan and not args.all:
            plans = [config.resolve(recipe, recipe_given.plan, None, recipe_given.origins).plan]
        if call.settings.dry_run:
            what = f"{args.steps} steps, {recipe.train.dtype}"
            facts = {"plans": [str(p) for p in plans], "all": args.all, "steps": args.steps}
            lines = [f"would verify  {p}  on {p.world} ranks, {what}" for p in plans]
            return call.would(facts, *lines, *(row.line() for row in refused))
        if args.all:
            covering = contributed("unisono.verify.cover").covering

            plans = covering(recipe)  # in the order in which they are proven
        prove = _static if args.static else _beside if beside else _prove
        outcome = prove(call, recipe, plans)
        for row in refused:
            call.settings.say(row.line())
        results = [*outcome["results"], *(row.as_dict() for row in refused)]
        return {**outcome, "results": results, "pass": outcome["pass"] and not refused}

    def code(self, result: Result) -> int:
        """3 where a plan does not hold, else 2 where one was refused."""
        rows = result.get("results", []) if result else []
        if any(row.get("refused") for row in rows) and all(
            row.get("pass") or row.get("refused") for row in rows
        ):
            return UsageError.exit
        return super().code(result)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan of several that cannot be played, so that the others are proven without it."""

    plan: str
    error: UnisonoError

    def line(self) -> str:
        """As the table shows it, with the remedy."""
        error = self.error.as_dict()
        return f"{self.plan}  refused: {error['code']} {error['what']}\n    try     {error['try']}"

    def as_dict(self) -> dict[str, Any]:
        """Its row of --json: a row of a proof, and why there is none."""
        return {
            "plan": self.plan, "ranks": None, "fidelity": None, "bit_identical": False, "max_rel_err": None,
            "first_divergence": None, "pass": False, "refused": self.error.as_dict(),
        }  # fmt: skip


def _accepted(
    texts: Sequence[str], resolve: "Callable[[Plan], Resolved]"
) -> "tuple[list[Plan], list[Refusal]]":
    """The plans of `--plan` that can be played, and the others. Raises UnisonoError where none can."""
    from unisono.plan import Plan

    plans, refused = [], []
    for text in texts:
        try:
            plans.append(resolve(Plan.parse(text, where="flag --plan")).plan)
        except UnisonoError as error:
            refused.append(Refusal(text, error))
    if refused and not plans:
        raise refused[0].error
    return plans, refused


def _static(call: CommandCall, recipe: "Recipe", plans: "list[Plan]") -> dict[str, Any]:
    """A line for each plan and each of its problems, and the object of --json."""
    from unisono.config import resolve
    from unisono.train.data.load import load

    prove = contributed("unisono.verify.static").prove

    corpus, proofs = load(recipe.data, recipe.model), []
    for plan in plans:
        proof = prove(resolve(recipe, plan), corpus)
        proofs.append(proof)
        word = "ok" if proof.passed else "FAIL"
        looked = f"{proof.calls:,} operations a step, by {len(proof.looked_at)} of them"
        call.settings.say(f"{proof.plan}  {proof.ranks} ranks, {looked}  {word}")
        for text in proof.problems:
            call.settings.say(f"    {text}")
        for text in proof.notes:
            call.settings.say(f"    note: {text}")
    return {"results": [proof.as_dict() for proof in proofs], "pass": all(proof.passed for proof in proofs)}


def _beside(call: CommandCall, recipe: "Recipe", plans: "list[Plan]") -> dict[str, Any]:
    """As `_prove`, and a table of other engines beside torch."""
    session = contributed("unisono.verify.engines.session")
    beside = session.EngineSession.of(call.args.witness, call.args.engine, recipe, plans, call.args.all)
    with beside.opened():
        outcome = _prove(call, recipe, plans, beside.shelf)
        rows = contributed("unisono.verify.engines.tell").tell_rows(beside, call.settings)
    results = [*outcome["results"], *rows["results"]]
    return {**outcome, "results": results, "pass": outcome["pass"] and rows["pass"]}


def _prove(
    call: CommandCall, recipe: "Recipe", plans: "list[Plan]", shelf: Path | None = None
) -> dict[str, Any]:
    """The table, a line for each plan as its proof ends, and the object of --json. shelf: see `prove`."""
    from unisono.verify.prover import KINDS, prove

    settings, steps = call.settings, call.args.steps
    settings.note(
        f"proving {len(plans)} plan{'s' * (len(plans) != 1)} against one process: {steps} steps,"
        f" {recipe.train.dtype}, gradients, parameters and optimiser state (importing torch) ..."
    )
    width = max([36, *(len(str(plan)) + len(" micros=8 precision=fp64") for plan in plans)])
    heads = " ".join(f"{kind:>8}" for kind in (*KINDS, "bound"))
    settings.say(f"{'plan':<{width}} {'ranks':>5} {'promise':<9} {heads}")
    proofs = prove(
        recipe,
        plans,
        steps,
        lambda proof: settings.say(_lines(proof, width)),
        keep_going=len(plans) > 1,
        shelf=shelf,
    )
    good = sum(proof.passed for proof in proofs)
    what = "what one process computes" if all(p.fidelity != "LOSSY" for p in proofs) else "what they promise"
    lossy = any(p.fidelity == "LOSSY" for p in proofs)
    more = "; the bound is that of gradients, and the update's follows from it" if lossy else ""
    settings.say(f"{good} of {len(proofs)} plans compute {what}; = means to the last bit{more}")
    for text in dict.fromkeys(text for proof in proofs for text in proof.notes):
        settings.say(f"note: {text}")
    outcome = {"results": [proof.as_dict() for proof in proofs], "pass": good == len(proofs)}
    if call.args.file is not None and Path(call.args.file).is_dir():  # a run, whose exports tell of it
        write_whole(run_folder(call.args.file) / PROOF, json.dumps(outcome, indent=1) + "\n")
    return outcome


def _conform(call: CommandCall) -> Result:
    """A line for each member and each of its faults, and the object of --json."""
    from tempfile import TemporaryDirectory

    suites = contributed("unisono.verify.conformance")
    names = call.args.conformance
    if call.settings.dry_run:
        nouns = [suites.family_of(name).noun for name in names]
        lines = (f"would judge  {noun} {name}" for noun, name in zip(nouns, names, strict=True))
        return call.would({"conformance": names}, *lines)
    judged = []
    for name in names:
        with TemporaryDirectory() as folder:
            judged.append(suites.held(name, Path(folder)))
        last = judged[-1]
        call.settings.say(
            f"{last.family} {name}  {'FAIL' if last.faults else 'ok'}  ({' '.join(last.suites)})"
        )
        for fault in last.faults:
            call.settings.say(f"    {fault}")
    return {
        "results": [asdict(conformity) for conformity in judged],
        "pass": not any(conformity.faults for conformity in judged),
    }


def _lines(proof: "Proof", width: int) -> str:
    from unisono.verify.prover import KINDS

    errors = [*(proof.max_rel_err[kind] for kind in KINDS), proof.bound]
    numbers = " ".join(f"{relative_error(error):>8}" for error in errors)
    word = {"proven": "ok", "unproven": "UNPROVEN"}.get(proof.verdict, "FAIL")
    text = f"{proof.plan:<{width}} {proof.ranks:>5} {proof.fidelity:<9} {numbers}  {word}"
    if proof.first_divergence:
        text += f"\n    first   {proof.first_divergence}"
    if proof.explanation:
        text += f"\n    likely  {proof.explanation} ({proof.cause})"
    return text


def _replay(call: CommandCall) -> Result:
    args = call.args
    if args.replay is None or args.plan or args.all or args.file or args.demo or args.dtype or call.keys:
        raise UsageError(
            "--replay RUN --step N takes a run as it was: no recipe, plan or key beside it",
            where="unisono verify",
            fix="unisono verify --replay RUN --step N",
            code="C04",
        )
    run = run_folder(args.replay)
    if call.settings.dry_run:
        step = "the last step" if args.step is None else f"step {args.step}"
        return call.would({"run_dir": str(run), "step": args.step}, f"would replay  {run}, {step}")
    from unisono.verify import replayer

    return replayer.run(run, args.step, call.settings)
