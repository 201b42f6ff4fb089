"""`unisono simulate`: a plan's price, and all that may be asked about it."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, cluster_asked, loaded, stack_asked, tokens


class SimulateVerb(RecipeVerb):
    """Price one plan on a cluster: time, bytes, memory; nothing is run."""

    name = "simulate"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument("--plan", metavar="PLAN", help='how it is spread, for example "dp=8 tp=8 pp=16"')
        parser.add_argument(
            "--cluster",
            metavar="C",
            help="dgx-a100:64 (nodes after the colon), A:8+B:16, or FILE.toml (this machine, if calibrated)",
        )
        parser.add_argument(
            "--stack", metavar="S", help="whose software is priced: a name, or FILE.toml (ours)"
        )
        parser.add_argument(
            "--out", metavar="PATH",
            help="draw where a step goes and its timetable, or a sweep: FILE.png or FILE.svg",
        )  # fmt: skip
        parser.add_argument(
            "--order", metavar="AXES",
            help="which axis lies innermost, as launch.order says it (tp,cp,shard,dp,pp); best: all orders",
        )  # fmt: skip
        parser.add_argument(
            "--trace", metavar="FILE", help="the simulated step for Perfetto: .json or .json.gz"
        )
        _add_studies(parser)

    def run(self, call: CommandCall) -> Result:
        args, settings = call.args, call.settings
        recipe = loaded(call, args.file, demo=args.demo)
        args.cluster, _ = cluster_asked(call)
        args.stack = stack_asked(call)
        from unisono.planner.clusters import is_mixture
        from unisono.planner.from_recipe import request_of
        from unisono.verbs._sizes import model_of
        from unisono_contrib.verbs import _studies as studies

        if is_mixture(args.cluster):
            from unisono_contrib.verbs import _mixed as mixed

            mixture, ask = mixed.priced(recipe, call.environ, args)
            if settings.dry_run:
                return _would_price(call, ask, mixture.name)
            result, page = mixed.simulated(mixture, ask)
        elif args.sweep and settings.dry_run:
            facts = {"cluster": args.cluster, "sweep": args.sweep}
            return call.would(facts, f"would sweep  {args.sweep}  on {args.cluster}")
        elif (study := studies.many(recipe, call.environ, args)) is not None:
            result, page = study
        else:
            ask = request_of(recipe, model_of(recipe, call.environ), args.cluster, args.stack, args.order)
            if settings.dry_run:
                return _would_price(call, ask, ask.cluster.name)
            result, page = studies.single(ask, args)
        settings.say(page)
        return result


def _would_price(call: CommandCall, ask: Any, cluster: str) -> Result:
    facts = {"plan": str(ask.plan), "cluster": cluster, "stack": ask.stack.name}
    return call.would(facts, f"would price  {ask.plan}  on {cluster} with {ask.stack.name}")


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _mtbf(text: str) -> tuple[float, str]:
    """HOURS, of one device, or HOURS/node, or HOURS/cluster."""
    hours, _, unit = text.partition("/")
    if unit not in ("", "device", "node", "cluster"):
        raise argparse.ArgumentTypeError(f"{text!r}: hours of a device, HOURS/node or HOURS/cluster")
    return _above_0(hours), unit or "device"


_STUDIES: Sequence[tuple[str, str, str, Callable[[str], Any], str]] = (
    ("cost", "--tokens", "N", tokens, "train on N tokens: 300e9, 300B, 1T"),
    ("cost", "--cost-per-hour", "MONEY", _above_0, "of one device"),
    ("data loading", "--loader-samples-s", "N", _above_0, "samples a second that one host decodes"),
    ("data loading", "--loader-gb-s", "R", _above_0, "what one host reads of its storage, 10^9 bytes/s"),
    ("data loading", "--sample-kb", "K", _above_0, "10^3 bytes of a sample there (as its values need)"),
    ("failures", "--mtbf", "HOURS", _mtbf, "between failures of a device; or HOURS/node"),
    ("failures", "--checkpoint-gb-s", "R", _above_0, "what the storage takes, 10^9 bytes/s in all"),
    ("failures", "--restart-s", "S", _above_0, "from a failure to the next step, less reading"),
    ("stragglers", "--stragglers", "LAW", str, "normal:0.05 lognormal:0.05 exponential:0.05 measured:FILE or RUN"),
    ("scaling", "--sweep", "KEY=A..B", str,
     "the best plan at each point of devices=8..1024 nodes= global_batch= micro_batch= context="),
    ("scaling", "--weak", "", bool, "with --sweep: the batch grows with the devices"),
    ("scaling", "--batches", "", bool, "which batch and accumulation suit the hardware"),
    ("scaling", "--noise-scale", "B", _above_0, "gradient noise scale, in samples: and the loss"),
)  # fmt: skip
"""Group, flag, metavar ("" for a flag without a value), reader and help of what is asked beyond one plan's price."""


def _add_studies(parser: Parser) -> None:
    titles = dict.fromkeys(title for title, *_ in _STUDIES)
    groups = {title: parser.add_argument_group(title) for title in titles}
    for title, flag, metavar, reader, about in _STUDIES:
        how: dict[str, Any] = {"metavar": metavar, "type": reader} if metavar else {"action": "store_true"}
        groups[title].add_argument(flag, help=about, **how)
