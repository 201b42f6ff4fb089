"""`unisono prove`: a script's own loop, played by one process and by several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import ConfigProblems, Interrupted, UnisonoError, UsageError
from unisono.spec.settings import Settings
from unisono.spec.words import relative_error
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono.library.loop_check import LoopPlay, LoopVerdict
    from unisono.plan import Plan


class ProveVerb(Verb):
    """Prove a script with a loop of its own: is each step on several ranks that of one process?

    The script, unchanged, is started once by one process and once by the ranks of each plan, from the same seeds, and
    stopped after a few steps of its optimisers. Losses, gradients, parameters and optimiser states of every step are
    compared. The plan of the script's own `unisono.init` is not asked for. What it writes to its folder is thrown away.
    """

    name = "prove"
    failed = 3
    epilog = 'unisono prove train.py --plan dp=2 --plan "dp=2 shard=2" -- --lr 0.1'

    def flags(self, parser: Parser) -> None:
        parser.usage = "unisono prove SCRIPT [--plan PLAN ...] [--steps N] [-- the script's own arguments]"
        parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls unisono.init")
        parser.add_argument(
            "--plan",
            action="append",
            default=[],
            metavar="PLAN",
            help="dp, shard, zero; may be repeated (dp=2)",
        )
        parser.add_argument(
            "--steps", type=int, default=3, metavar="N", help="steps of optimisers to compare (3)"
        )
        parser.add_argument(
            "--dtype", choices=("float32", "float64"), default="",
            help="torch's default dtype in the script; float64 leaves no room for luck",
        )  # fmt: skip
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="of all generators, at the start (0)"
        )
        parser.add_argument(
            "--timeout", type=float, default=120.0, metavar="S",
            help="seconds that a rank may keep the others waiting (120)",
        )  # fmt: skip

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        at = list(words).index("--") if "--" in words else len(words)
        args = self.parser().read(words[:at])
        args.words = list(words[at + 1 :])
        return CommandCall(settings, args, environ)

    def code(self, result: Result) -> int:
        """1 where the plans that do not hold are those under which the script raised, else 3."""
        wrong = [] if result is None else [r for r in result.get("results", ()) if not r["pass"]]
        return 1 if wrong and all(r["cause"] == "raised" for r in wrong) else super().code(result)

    def run(self, call: CommandCall) -> Result:
        from unisono.plan import Plan

        args = call.args
        script = Path(args.script).resolve()
        if not script.is_file():
            fix = "unisono prove SCRIPT.py; a recipe is proven by unisono verify"
            raise UsageError(f"no such file: {args.script}", where="unisono prove", fix=fix, code="C03")
        if args.steps < 1:
            raise UsageError(
                f"--steps {args.steps}: at least one", where="unisono prove", fix="--steps 3", code="C04"
            )
        plans = [Plan.parse(text, where="flag --plan") for text in args.plan or ["dp=2"]]
        if call.settings.dry_run:
            facts = {"script": str(script), "plans": [str(p) for p in plans], "steps": args.steps}
            return call.would(facts, *(f"would prove  {script.name} under {p}" for p in plans))
        _check(plans)
        return _prove(call, script, plans)


def _check(plans: "Sequence[Plan]") -> None:
    """Raises ConfigProblems for what no loop of a user's is played under, UsageError C04 for no number of ranks."""
    from unisono.library.enter import not_here

    problems = [p for plan in plans for p in (*plan.check(), *not_here(plan))]
    if problems:
        raise ConfigProblems(list({p.where: p for p in problems}.values()))
    for plan in plans:
        if -1 in (plan.dp, plan.shard) or plan.world < 2:
            what = f"--plan {plan}: one rank has nothing to be compared with"
            raise UsageError(what, where="unisono prove", fix="--plan dp=2", code="C04")


def _prove(call: CommandCall, script: Path, plans: "Sequence[Plan]") -> Result:
    """The table, a line for each plan as it ends, and the object of --json."""
    from unisono.launch.fork_server import ForkServer
    from unisono.library.loop_check import ENTRY, KINDS, Terms, not_played, playing
    from unisono.library.proven import keep

    settings, args = call.settings, call.args
    settings.note(
        f"playing {script.name} on one process, and under {len(plans)} plan{'s' * (len(plans) != 1)}:"
        f" {args.steps} steps{f', {args.dtype}' if args.dtype else ''} (importing torch) ..."
    )
    terms = Terms(args.steps, args.dtype, args.seed, args.timeout, _heard(settings))
    play_it = {"script": str(script), "words": args.words, "cwd": str(Path.cwd())}
    verdicts: list[LoopVerdict] = []
    files: list[str] = []

    width = max(24, *(len(str(plan)) for plan in plans))

    def first(alone: "LoopPlay") -> None:
        files.extend(alone.files)
        if settings.json is False:
            heads = " ".join(f"{kind:>8}" for kind in (*KINDS, "bound"))
            settings.say(f"{'plan':<{width}} {'ranks':>5} {'steps':>5} {heads}")

    with ForkServer(ENTRY) as nursery, playing(nursery, play_it, terms, first) as verdict:
        for plan in plans:
            try:
                verdicts.append(verdict(plan))
            except Interrupted:
                raise
            except UnisonoError as error:
                verdicts.append(not_played(plan, error))
            settings.say(_lines(verdicts[-1], width))
    good = sum(proved.passed for proved in verdicts)
    known = {plan: (proved.passed, proved.steps) for plan, proved in zip(plans, verdicts, strict=True)}
    kept = keep(script, files, known)
    settings.say(f"{good} of {len(plans)} plans compute what one process computes; = means to the last bit")
    if kept is None:
        settings.note(
            f"the verdict cannot be kept beside {script.name}: runs will say that it was never proven"
        )
    results = [proved.as_dict() for proved in verdicts]
    return {"script": str(script), "dtype": args.dtype, "results": results, "pass": good == len(plans)}


def _heard(settings: Settings) -> Any:
    """What ranks print is progress."""

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] in ("output", "note"):
            settings.note(f"rank {rank} | {event['text']}")

    return hear


def _lines(verdict: "LoopVerdict", width: int) -> str:
    from unisono.library.loop_check import KINDS

    numbers = " ".join(
        f"{relative_error(error):>8}" for error in (*(verdict.worst.get(k) for k in KINDS), verdict.bound)
    )
    word = "ok" if verdict.passed else "FAILS"
    text = f"{verdict.plan:<{width}} {verdict.ranks:>5} {verdict.steps:>5} {numbers}  {word}"
    if not verdict.passed:
        text += f"\n    first   {verdict.where()}"
    if verdict.explanation:
        text += f"\n    likely  {verdict.explanation} ({verdict.cause})"
    notes = [note for note in verdict.notes if note.startswith("U-")]
    return text + "".join(f"\n    told    {note}" for note in notes)
