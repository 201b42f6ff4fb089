"""`unisono plan`."""

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.words import whole
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, cluster_asked, loaded, stack_asked, tokens

if TYPE_CHECKING:
    from unisono.planner.machines.cluster import Cluster
    from unisono.planner.space import Space


class PlanVerb(RecipeVerb):
    """Rank the plans that train can play on a cluster, and say why one is best."""

    name = "plan"
    top = ("name", "seed")

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument("--cluster", metavar="C",
                            help="dgx-a100:64, A:8+B:16, or FILE.toml (this machine, if calibrated)")  # fmt: skip
        parser.add_argument(
            "--check", action="store_true",
            help="play the best for some steps here: needs unisono calibrate, or --cluster for this machine",
        )  # fmt: skip
        parser.add_argument("--plan", metavar="KEYS", help='keys to hold, for example "tp=8 precision=bf16"')
        parser.add_argument(
            "--all-keys",
            action="store_true",
            help="also what hardly ever wins, and what train cannot play, only priced",
        )
        parser.add_argument(
            "--fewer", action="store_true", help="the front over a half, a quarter ... of the nodes too"
        )
        parser.add_argument("--tokens", metavar="N", type=tokens, help="train on N tokens: 300e9, 300B, 1T")
        parser.add_argument("--top", metavar="K", type=_count, default=4, help="how many to show (default 4)")
        parser.add_argument(
            "--objective", choices=("time", "memory"), default="time", help="what is best (default time)"
        )
        parser.add_argument(
            "--stack", metavar="S", help="whose software is priced: a name, or FILE.toml (ours)"
        )

    def run(self, call: CommandCall) -> Result:
        args = call.args
        recipe = loaded(call, args.file, demo=args.demo)
        from unisono.planner import best
        from unisono.planner.clusters import is_mixture
        from unisono.planner.from_recipe import of_tokens
        from unisono.planner.predict import calibration
        from unisono.planner.space import space_of
        from unisono.verbs._sizes import model_of

        if args.check and not args.cluster:
            _require_calibration(call)
        args.cluster, is_here = cluster_asked(call)
        args.stack = stack_asked(call)
        if is_mixture(args.cluster):
            return _on_mixture(call, recipe)
        model = model_of(recipe, call.environ)
        space = space_of(recipe, model, args.plan, args.cluster, args.stack, args.all_keys and not args.check)
        space = of_tokens(space, args.tokens)
        if is_here or space.cluster.cores:
            has_gpus = not space.cluster.cores and calibration(call.environ).is_file()
            by_cores = is_here and not has_gpus
            space = replace(space, cluster=_of_ranks(space, recipe.recipe.launch.ranks, by_cores))
        if call.settings.dry_run:
            facts = {"cluster": space.cluster.name, "stack": space.stack.name}
            return call.would(facts, f"would search  {space.cluster.name} with {space.stack.name}")
        if args.check:
            from unisono.measure import check

            check.played_here(space)
        result, page = best.run(space, args.cluster, args.top, args.objective, args.fewer)
        call.settings.say(page)
        if not args.check:
            return result
        more, page = check.run(recipe, space, args.top)
        call.settings.say(f"\n{page}")
        return {**result, **more}


def _count(text: str) -> int:
    if not (count := whole(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count


def _on_mixture(call: CommandCall, recipe: Any) -> Result:
    from unisono.planner.from_recipe import of_tokens

    mixed = contributed("unisono.verbs._mixed")
    mixture, space = mixed.searched(recipe, call.environ, call.args)
    space = of_tokens(space, call.args.tokens)
    if call.settings.dry_run:
        facts = {"cluster": mixture.name, "stack": space.stack.name}
        return call.would(facts, f"would search  {mixture.name} with {space.stack.name}")
    result, page = mixed.planned_on(mixture, space, call.args.top)
    call.settings.say(page)
    return result


def _of_ranks(space: "Space", ranks: int | None, by_cores: bool) -> "Cluster":
    """The cluster with as many ranks as were asked for, by launch.ranks or by the sizes that --plan holds; else with
    one for each core, or each device of the cluster. by_cores: it stands for the CPU of this machine."""
    from unisono.planner.predict import of_ranks

    cores = len(os.sched_getaffinity(0)) if by_cores else space.cluster.devices
    held = space.held.inner * max(1, space.held.dp)
    return of_ranks(space.cluster, ranks or max(cores, held))


def _require_calibration(call: CommandCall) -> None:
    """Raises UsageError P19 where nobody has measured this machine."""
    from unisono.planner.predict import calibration

    if not calibration(call.environ).is_file():
        raise UsageError(
            "--check needs this machine in numbers",
            where="unisono plan",
            fix="unisono calibrate, once",
            code="P19",
        )
