"""What verbs that take a recipe share: its flags, and loading it."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Verb

if TYPE_CHECKING:
    from unisono.config import Loaded
    from unisono.planner.stack import Stack


class RecipeVerb(Verb):
    """A verb over a recipe. top: the top-level keys of a recipe that are flags of this verb too."""

    epilog: ClassVar[str] = (
        "any key of the recipe can be set: --train.steps 100, --model.n_layer=8, --no-train.fused;\n"
        "--model gpt is --model.kind gpt. All keys with their values: unisono config show"
    )
    top: ClassVar[tuple[str, ...]] = ("name", "seed", "plan")

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "file", nargs="?", metavar="FILE", help="recipe: FILE.toml, FILE.py:FUNCTION or a run folder"
        )
        parser.add_argument(
            "--demo", action="store_true", help="the built-in recipe: a small GPT on 4 processes"
        )

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        from unisono.config import split_flags
        from unisono.config.fields import keys as all_keys
        from unisono.plan.grammar import KEYS

        keys, rest = split_flags(words, top=self.top)
        parser = self.parser()
        parser.recipe_keys, parser.plan_words = all_keys(), KEYS
        return CommandCall(settings, parser.read(rest), environ, keys)


def loaded(
    call: CommandCall, file: str | None, *, keys: Sequence[tuple[str, str | None]] = (), demo: bool = False
) -> "Loaded":
    """Recipe and plan as said by `file` or the demo, variables, flags and `keys`. Raises ConfigProblems."""
    from unisono import config

    flags = [*call.keys, *keys]
    if not demo:
        return config.load(file, flags, environ=call.environ)
    if file is not None:
        raise UsageError(
            f"--demo is a recipe, and so is {file}", where="unisono", fix="one of them", code="C04"
        )
    from unisono.recipes.demo import demo as recipe

    return config.load(None, flags, environ=call.environ, base=recipe(), base_origin="recipes/demo.py")


def cluster_asked(call: CommandCall) -> tuple[str, bool]:
    """(the cluster that `--cluster` names, False); without the flag this machine, as `unisono calibrate` measured it,
    or else the built-in laptop, and True. A note says so where nobody has measured this machine."""
    from unisono.planner import predict

    if call.args.cluster:
        return call.args.cluster, False
    calibrated = predict.calibration(call.environ)
    if calibrated.is_file():
        return str(calibrated), True
    call.settings.note(
        f"nobody has measured this machine: these are figures of the built-in cluster {predict.FALLBACK}"
        " (unisono calibrate measures this one, --cluster names another)"
    )
    return predict.FALLBACK, True


def stack_asked(call: CommandCall) -> "Stack | None":
    """The software that `--stack` names, None without it. Raises UsageError."""
    if call.args.stack is None:
        return None
    from unisono.verbs._sizes import stack_of

    return stack_of(call.args.stack, call.args.cluster, call.environ)


def tokens(text: str) -> float:
    """`--tokens`: a number above 0, with K, M, B or T behind it: 300e9, 300B, 1T."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    try:
        value = float(text[:-1] if scale else text) * (scale or 1.0)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 300e9, 300B or 1T")
    return value


def started_ranks(call: CommandCall) -> int | None:
    """The world that torchrun, Slurm or the like has started already; None when nobody has. Raises UsageError."""
    from unisono.launch import env

    place = env.detect(call.environ)
    return None if place is None else place.world
