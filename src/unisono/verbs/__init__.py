"""The verbs of the command line, one a file (or a folder), found by file name: its flags and what it does.

A verb's file imports nothing heavy, so that `--help` answers at once; what it needs to run it imports in `run`. What
ranks play of it, and imports torch, is in files called `rank`.
"""

import argparse
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from unisono.spec.elsewhere import remedy_for
from unisono.spec.errors import UsageError
from unisono.spec.finder import Finder
from unisono.spec.paths import file_and_name
from unisono.spec.settings import Settings
from unisono.spec.words import nearest

Result = Mapping[str, Any] | None
_LACKS = re.compile(r"argument (--[\w-]+): expected one argument")


@dataclass(frozen=True, slots=True)
class CommandCall:
    """One command. args: its flags, read. keys: the recipe's keys that are set by flags, each with its text."""

    settings: Settings
    args: argparse.Namespace
    environ: Mapping[str, str]
    keys: Sequence[tuple[str, str | None]] = ()

    def would(self, facts: Mapping[str, Any], *lines: str) -> Result:
        """Print what --dry-run says and return its object."""
        for line in lines:
            self.settings.say(line)
        return {"dry_run": True, **facts}


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are errors of ours, with the nearest flag.

    recipe_keys, plan_words: what else the verb takes, `--train.lr` and `--plan "dp=2"`, to be named in remedies."""

    recipe_keys: Collection[str] = ()
    plan_words: Collection[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str, fix: str = "") -> NoReturn:
        if lacks := _LACKS.match(message):
            fix = f"{self.prog} --help; {lacks[1]}=VALUE, if the value begins with a dash"
        raise UsageError(message, where=self.prog, fix=fix or f"{self.prog} --help", code="C04")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses; an unknown flag is answered with the nearest one. Raises UsageError."""
        args, left = self.parse_known_args(list(words))
        if not left:
            return args
        if left[0].startswith("-") and Path((file_and_name(left[0]) or left)[0]).is_file():
            self.error(f"{left[0]} begins with a dash, as flags do", fix=f"./{left[0]}")
        word = left[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unknown argument {word}")
        flags = [name for action in self._actions for name in action.option_strings]
        plain = word.lstrip("-").replace("-", "_")
        if plain in self.plan_words:
            value = left[0].partition("=")[2] or (
                left[1] if left[1:] and not left[1].startswith("-") else "2"
            )
            self.error(f"{word} is a word of the plan", fix=f'--plan "{plain}={value}"')
        if keys := [key for key in self.recipe_keys if key.rpartition(".")[2] == plain]:
            self.error(f"unknown flag {word}; did you mean --{' or --'.join(keys)}?")
        if remedy := remedy_for(word):
            self.error(f"unknown flag {word}", fix=remedy)
        # Of sections with the same leaf the first.
        leaves = {key.rpartition(".")[2]: f"--{key}" for key in reversed([*self.recipe_keys])}
        near = nearest(word, [*flags, *leaves])
        self.error(f"unknown flag {word}" + (f"; did you mean {leaves.get(near, near)}?" if near else ""))


class Verb(ABC):
    """A word of the command line. The first line of its docstring stands beside it in `unisono --help`, the whole above
    its flags.

    failed: the exit code for an object of --json that says that something did not pass.
    """

    name: ClassVar[str]
    failed: ClassVar[int] = 0
    epilog: ClassVar[str] = ""

    @classmethod
    def summary(cls) -> str:
        """What it does, in a line."""
        return (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")

    def parser(self) -> Parser:
        """Its flags, and those that every verb takes."""
        parser = Parser(prog=f"unisono {self.name}", description=inspect.getdoc(self), epilog=self.epilog)
        parser.add_argument("--json", action="store_true", help="exactly one JSON object on stdout")
        parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
        parser.add_argument("--no-color", action="store_true", help="no colours (so does NO_COLOR)")
        parser.add_argument("--dry-run", action="store_true", help="print exactly what would run")
        self.flags(parser)
        return parser

    def help(self, words: Sequence[str]) -> str:
        """Return the text of --help."""
        return self.parser().format_help()

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        """The words after the verb. Raises UsageError."""
        return CommandCall(settings, self.parser().read(words), environ)

    @abstractmethod
    def flags(self, parser: Parser) -> None:
        """Adds the verb's own flags."""

    def code(self, result: Result) -> int:
        """The exit code after `run` has returned."""
        did_not_pass = result is not None and (result.get("pass") is False or result.get("ok") is False)
        return self.failed if did_not_pass else 0

    @abstractmethod
    def run(self, call: CommandCall) -> Result:
        """Run the verb. Return the object of --json (without schema_version), or None."""


VERBS: Finder[Verb] = Finder("verb", "unisono.verbs", Verb, "unisono")
