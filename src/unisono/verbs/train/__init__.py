"""`unisono train`: its flags here, the supervisor's side in `run`, every rank's in `rank`."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.launch.backend import DEVICES
from unisono.plan.batch import batch_of
from unisono.plan.grammar import families
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.runs import CHECKPOINTS, CONFIG, run_folder
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded, started_ranks

if TYPE_CHECKING:
    from argparse import Namespace

    from unisono.config import Loaded, Resolved
    from unisono.launch.signals import StartupSignals
    from unisono.verbs.train.planning import Play

AUTO = "auto"
_WHAT = ("model.", "data.", "train.")  # sections that say what is computed


class TrainVerb(RecipeVerb):
    """Train a recipe under a plan."""

    name = "train"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.epilog = f"{parser.epilog}\n\n{families()}"
        parser.add_argument(
            "--resume",
            metavar="RUN",
            help="continue the run in this folder, or from this checkpoint of it; auto: the newest of its name, if"
            " there is one",
        )
        parser.add_argument(
            "--plan", metavar="PLAN", help='how it is spread, for example "dp=2 pp=2", or auto'
        )
        parser.add_argument(
            "--device", metavar="DEVICE",
            help="cpu, gpu, or a simulated device for each rank: sim, sim:memory=64MiB; as --launch.backend",
        )  # fmt: skip
        parser.add_argument(
            "--fit-micro-batch", action="store_true",
            help="the largest train.micro_batch that fits this machine's memory, by the ledger",
        )  # fmt: skip
        parser.add_argument(
            "--until", type=int, metavar="STEP",
            help="stop after this step, validated and saved; the schedule stays that of train.steps",
        )  # fmt: skip
        parser.add_argument(
            "--guard", nargs="?", const="200", metavar="N",
            help="every N steps (200), check that replicas agree: --train.guard N",
        )  # fmt: skip

        parser.add_argument(
            "--profile", metavar="steps=FIRST:LAST",
            help="profile these steps on every rank, into profile/ of the run: --train.profile FIRST:LAST",
        )  # fmt: skip
        parser.add_argument(
            "--chaos", metavar="SCRIPT",
            help="play faults on the run: a file of them, `kill:who=2:step=10`, or random:seed=3:faults=20",
        )  # fmt: skip
        parser.add_argument(
            "--hosts", metavar="A,B:4",
            help="spread the run over hosts, this one first; after a colon, how many ranks one takes",
        )  # fmt: skip
        parser.add_argument(
            "--world", type=int, metavar="N",
            help="with --dry-run: run one rank of N by itself, without numbers, and show what it holds and calls",
        )  # fmt: skip
        parser.add_argument("--rank", type=int, metavar="R", help="with --world: which rank (0)")

    def run(self, call: CommandCall) -> Result:
        from unisono.launch.signals import StartupSignals

        with StartupSignals(keeps=_is_rank(call.environ)) as early:
            return self._run(call, early)

    def _run(self, call: CommandCall, early: "StartupSignals") -> Result:
        from unisono import config

        args, file = call.args, call.args.file
        again = args.resume == AUTO
        if again and file is None and not args.demo:
            raise UsageError("--resume auto looks for a run of a recipe's name, and there is no recipe",
                             where="unisono train", fix="unisono train FILE --resume auto", code="C04")  # fmt: skip
        resume, checkpoint = resumed(args.resume) if args.resume is not None and not again else (None, "")
        if resume is not None and file is None and not args.demo:
            file = str(resume / CONFIG)
        keys = _keys(args)
        keys += [("train.profile", args.profile.removeprefix("steps="))] if args.profile is not None else []
        recipe = loaded(call, file, keys=keys, demo=args.demo)
        if recipe.plan.auto:
            from unisono.verbs.train import planning

            recipe, why = planning.choose(recipe, started_ranks(call), call.environ, _player(call))
            for line in why:
                call.settings.note(line)
        ranks = _ranks(call, recipe)
        if resume is not None and file == str(resume / CONFIG):
            recipe = _with_micro_batches(call, recipe, ranks)
        if args.fit_micro_batch:
            recipe = _fitted(call, recipe, ranks)
        resolved = config.resolve(recipe.recipe, recipe.plan, ranks, recipe.origins)
        _refuse_of_other_verbs(resolved)
        text, chaos = config.resolved_toml(resolved), _faults(call, resolved)
        for line in resolved.plan.idle():
            call.settings.note(f"note  {line}")
        if args.hosts is not None:
            from unisono.verbs.train.spreading import hosts_of

            hosts_of(args.hosts, resolved.plan.world)
        _require_stop(args.until, resolved)
        if call.settings.dry_run:
            return (
                _would_train(call, resolved, text, resume)
                if args.world is None
                else _rehearsed(call, resolved)
            )
        if not any(origin != "default" for key, origin in recipe.origins.items() if key.startswith(_WHAT)):
            raise UsageError("nothing says what to train", where="unisono train",
                             likely="--dry-run shows the recipe of the defaults",
                             fix="unisono train FILE; unisono new FILE writes one; unisono train --demo",
                             code="C04")  # fmt: skip
        from unisono.verbs.train.folder import guardian_of, order_again
        from unisono.verbs.train.order import TrainOrder

        order = TrainOrder(
            resolved.recipe, resolved.plan, text, resume, resume is not None, checkpoint, again, chaos,
            until=args.until or 0,
        )  # fmt: skip
        guardian = guardian_of(order, call.settings, call.environ)  # before anything heavy is imported
        from unisono.verbs.train import run

        order = order_again(order, guardian)
        return run.run(
            order, call.settings, resolved.origins, early, demo=args.demo, guardian=guardian, hosts=args.hosts
        )


def _keys(args: "Namespace") -> list[tuple[str, str]]:
    """Keys of the recipe that have flags of their own."""
    device = args.device and DEVICES.get(args.device, args.device)
    return [
        (key, value)
        for key, value in (("train.guard", args.guard), ("launch.backend", device))
        if value is not None
    ]


def _refuse_of_other_verbs(resolved: "Resolved") -> None:
    """Raises UsageError C06 where the recipe has a section that another verb plays."""
    for section in resolved.recipe.sections():
        if section.verb:
            raise UsageError(f"unisono train does not play [{section.name}]", where=section.name,
                             fix=f"unisono {section.verb} FILE; or a recipe without this section",
                             code="C06")  # fmt: skip


def _with_micro_batches(call: CommandCall, recipe: "Loaded", ranks: int | None) -> "Loaded":
    """The recipe of a run that goes on under another plan, with micro-batches that fit this one: the old size where it
    does, else the largest part of it. A size that flags or variables say stays."""
    train, origin = recipe.recipe.train, recipe.origins["train.micro_batch"]
    if origin.startswith(("flag", "env")) or not train.micro_batch:
        return recipe
    with suppress(UsageError):  # a plan that does not fill the ranks: told where it is resolved
        plan = recipe.plan.fill(ranks)
        if batch_of(plan, train)[1] is None:
            return recipe
        share = train.global_batch // (plan.replicas * (plan.micros or 1))
        size = share if plan.micros else gcd(train.micro_batch, share)
        fitted = train.model_copy(update={"micro_batch": size})
        if size and batch_of(plan, fitted)[1] is None:
            call.settings.note(
                f"note  micro_batch {size} instead of {train.micro_batch}, which this plan cannot take"
            )
            origins = {**recipe.origins, "train.micro_batch": f"derived: {batch_of(plan, fitted)[0]}"}
            return replace(recipe, recipe=recipe.recipe.model_copy(update={"train": fitted}), origins=origins)
    return recipe


def _player(call: CommandCall) -> "Play | None":
    """What measures plans on this machine; None where nothing is started here, or ranks are on other machines too."""
    if call.settings.dry_run or call.args.hosts or started_ranks(call) is not None:
        return None
    from unisono.measure.check import played

    return played


def _ranks(call: CommandCall, recipe: "Loaded") -> int | None:
    """How many ranks there are, where that is not the plan's to say. Raises UsageError."""
    args, started = call.args, started_ranks(call)
    if args.world is None and args.rank is not None:
        raise UsageError("--rank names a rank of --world N", where="unisono train", fix="--world 4096 --rank 17",
                         code="C04")  # fmt: skip
    if args.world is not None and not call.settings.dry_run:
        raise UsageError("--world N looks at one rank of N without starting any", where="unisono train",
                         fix="--dry-run --world N --rank R; --launch.ranks N starts N", code="C04")  # fmt: skip
    if args.hosts and started is not None:
        raise UsageError("--hosts starts ranks, and these were started by others", where="--hosts",
                         fix="the same command without --hosts, or without a starter", code="L10")  # fmt: skip
    if args.hosts and recipe.plan.dp == -1 and recipe.recipe.launch.ranks is None:
        from unisono.verbs.train.spreading import room_of

        return room_of(args.hosts)
    return started if args.world is None else args.world


def _require_stop(until: int | None, resolved: "Resolved") -> None:
    """Raises UsageError where the run cannot end after step `until`: C02, and P24 for a pipeline that is not empty."""
    if until is None:
        return
    if until < 1:
        raise UsageError(f"--until {until} is no step", where="--until", fix="--until 100", code="C02")
    from unisono.programs.schedules import SCHEDULES, Unflushed

    if isinstance(SCHEDULES.read(resolved.plan.schedule), Unflushed) and resolved.plan.pp > 1:
        what = (
            f"--until {until}: the pipeline of schedule={resolved.plan.schedule} is not empty between steps"
        )
        raise UsageError(
            what, where="--until, plan.schedule", fix="--train.steps N, or schedule=1f1b", code="P24"
        )


def _is_rank(environ: Mapping[str, str]) -> bool:
    """Whether others started this process as one of several ranks; a set of variables that is wrong is told later."""
    from unisono.launch import env

    with suppress(UsageError):
        return env.detect(environ) is not None
    return False


def _faults(call: CommandCall, resolved: "Resolved") -> str:
    """The script that --chaos names, as ranks get it."""
    if call.args.chaos is None:
        return ""
    script = contributed("unisono.programs.chaos.script")

    return script.read(call.args.chaos, resolved.plan.world, resolved.recipe.train.steps).as_text()


def _rehearsed(call: CommandCall, resolved: "Resolved") -> Result:
    """One rank alone: its real code on the meta device."""
    from unisono.verbs.train.rehearsal import describe

    facts, lines = describe(resolved, call.args.world, call.args.rank or 0, call.environ)
    return call.would({"plan": str(resolved.plan), **facts}, f"plan         {resolved.plan}", *lines)


def _fitted(call: CommandCall, recipe: "Loaded", ranks: int | None) -> "Loaded":
    from unisono.verbs.train import room

    fitted, said = room.with_largest_micro_batch(recipe, ranks, call.environ)
    call.settings.note(said)
    return fitted


def resumed(path: str) -> tuple[Path, str]:
    """(the run's folder, the name of the checkpoint if `path` is that of one). Raises UsageError C03."""
    checkpoint = Path(path)
    if (checkpoint / "manifest.json").is_file() and checkpoint.parent.name == CHECKPOINTS:
        return run_folder(checkpoint.parents[1]), checkpoint.name
    return run_folder(path), ""


def _would_train(call: CommandCall, resolved: "Resolved", text: str, resume: Path | None) -> Result:
    from unisono.config import as_json

    recipe, plan, batch = resolved.recipe, resolved.plan, resolved.batch
    lines = [
        text,
        f"would train  {recipe.name}, {recipe.train.steps} steps",
        f"plan         {plan}",
        f"batch        {batch}",
        f"ranks        {plan.world}",
        f"out          {Path(recipe.out.dir, recipe.name)}",
        *([f"resume       {resume}"] if resume is not None else []),
    ]
    sums = {k: getattr(batch, k) for k in ("global_batch", "micro_batch", "micros", "replicas")}
    facts = {
        "plan": str(plan), "ranks": plan.world, "batch": sums, "resume": str(resume) if resume is not None else None,
        "recipe": as_json(recipe), "origins": resolved.origins,
    }  # fmt: skip
    return call.would(facts, *lines)
