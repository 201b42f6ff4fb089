"""`unisono completion SHELL`."""

import argparse
from typing import ClassVar

from unisono.verbs import VERBS, CommandCall, Parser, Result, Verb
from unisono.verbs._recipe import RecipeVerb


class CompletionVerb(Verb):
    """Print what completes verbs, flags and the recipe's keys in a shell."""

    name = "completion"
    epilog: ClassVar[str] = (
        'bash: eval "$(unisono completion bash)" in ~/.bashrc\n'
        'zsh:  eval "$(unisono completion zsh)" in ~/.zshrc, below compinit\n'
        "fish: unisono completion fish > ~/.config/fish/completions/unisono.fish"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument("shell", choices=("bash", "zsh", "fish"))

    def run(self, call: CommandCall) -> Result:
        from shtab import complete

        script = complete(whole_parser(), call.args.shell)
        call.settings.say(script.rstrip("\n"))
        return {"shell": call.args.shell, "script": script}


def whole_parser() -> argparse.ArgumentParser:
    """All verbs as one parser, each with its flags and those that set keys of a recipe."""
    from shtab import FILE

    from unisono.config.fields import keys

    whole = argparse.ArgumentParser(prog="unisono")
    whole.add_argument("--version", action="store_true", help="print the version")
    verbs = whole.add_subparsers()
    for name in VERBS.names():
        verb = VERBS.find(name)()
        parser = verbs.add_parser(name, help=verb.summary(), parents=[verb.parser()], add_help=False)
        for action in parser._actions:
            if not action.option_strings and action.choices is None:
                action.complete = FILE  # type: ignore[attr-defined]
        if not isinstance(verb, RecipeVerb):
            continue
        known = {flag for action in parser._actions for flag in action.option_strings}
        for key, about in keys().items():
            if ("." in key or key in verb.top) and f"--{key}" not in known:
                parser.add_argument(f"--{key}", help=(about.description or "").replace("%", "%%"))
    return whole
