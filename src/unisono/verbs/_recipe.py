"""What verbs that take a recipe share: its flags, and loading it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.spec.errors import UsageError
from unisono.verbs._call import Call, Parser, common

if TYPE_CHECKING:
    from unisono.config import Loaded

_KEYS = "any key of the recipe can be set: --train.steps 100, --model.n_layer=8, --no-train.fused;\n"\
    "--model gpt is --model.kind gpt. All keys with their values: unisono config show"  # fmt: skip


def recipe_parser(prog: str, about: str) -> Parser:
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
