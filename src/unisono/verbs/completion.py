"""`unisono completion SHELL`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from unisono.verbs import VERBS, CommandCall, Parser, Result, Verb
from unisono.verbs._recipe import RecipeVerb

_BASH = """\
_unisono() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    elif [[ "$word" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _unisono unisono
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


class CompletionVerb(Verb):
    """Print what completes verbs, flags and the recipe's keys in a shell."""

    name = "completion"
    epilog: ClassVar[str] = (
        'bash, zsh: eval "$(unisono completion bash)" in ~/.bashrc, or zsh in ~/.zshrc\n'
        "fish: unisono completion fish > ~/.config/fish/completions/unisono.fish"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument("shell", choices=("bash", "zsh", "fish"))

    def run(self, call: CommandCall) -> Result:
        words, shell = words_of_verbs(), call.args.shell
        script = _fish(words) if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash(words)
        call.settings.say(script.rstrip("\n"))
        return {"shell": shell, "script": script}


def words_of_verbs() -> dict[str, Sequence[str]]:
    """Each verb and the flags behind it, those that set keys of a recipe among them."""
    from unisono.config.fields import keys

    found: dict[str, Sequence[str]] = {}
    for name in VERBS.names():
        verb = VERBS.find(name)()
        own = [flag for action in verb.parser()._actions for flag in action.option_strings]
        recipe = (
            [f"--{key}" for key in keys() if "." in key or key in verb.top]
            if isinstance(verb, RecipeVerb)
            else []
        )
        found[name] = list(dict.fromkeys((*own, *recipe)))
    return found


def _bash(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f'            {name}) words="{" ".join(flags)}" ;;' for name, flags in words.items())
    return _BASH.format(verbs=" ".join(words), cases=cases)


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c unisono -n __fish_use_subcommand -f -a {name}" for name in words]
    for name, flags in words.items():
        seen = f'-n "__fish_seen_subcommand_from {name}"'
        lines += [f"complete -c unisono {seen} -l {flag[2:]}" for flag in flags if flag.startswith("--")]
    return "\n".join(lines) + "\n"
