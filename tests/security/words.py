"""Kinds of hostile input that a user types, or is given to type: plans, flags, variables, commands, scripts of faults."""

import io
import os
import random
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

from tests.security.confined import Kind
from tests.security.mutate import JUNK, mutated, random_text
from unisono import cli, config
from unisono.config.fields import SECTIONS, keys
from unisono.config.models import Recipe
from unisono.launch import env
from unisono.launch.starters import STARTERS
from unisono.plan import Plan
from unisono.plan.grammar import KEYS, NAMED, PACKAGES, SIZES, known
from unisono.spec.doubtful import visible
from unisono.spec.finder import family_in, names_in
from unisono.verbs import VERBS
from unisono_contrib.programs.chaos import script
from unisono_contrib.programs.chaos.fault import FAULTS, PHASES

# --- plans ---


def _option(member: Any, order: random.Random) -> str:
    fields = list(member.model_fields)
    if not fields:
        return ""
    said = [
        f"{key}={order.choice(('1', '2', '8', '0.01', 'bf16', 'auto', 'true', order.choice(JUNK)))}"
        for key in order.sample(fields, order.randint(0, len(fields)))
    ]
    return ":" + ",".join(said) if said else ""


def _value(key: str, order: random.Random) -> str:
    if key in SIZES:
        return str(order.choice((1, 2, 3, 4, 8, -1, "2x2", "3:wire=int8,prefetch=2", "4:chunks=2", 10**7)))
    if key == "blocks":
        return order.choice(
            ("0-3:recompute=full", "0-1:tp=1;2-3:zero=2", "0:offload=params", "alike", "5-2:tp=1")
        )
    name = order.choice(known(key))
    if key in PACKAGES and name in names_in(PACKAGES[key]):
        name += _option(family_in(PACKAGES[key]).find(name), order)
    return name + order.choice(("", "", "", "+ef", "+mc:momentum=0.9", ":params", ":full=2"))


def plan_text(order: random.Random) -> str:
    """A plan that may well be good."""
    chosen = order.sample(KEYS, order.randint(1, 6))
    return " ".join(f"{key}={_value(key, order)}" for key in chosen)


def _plan(order: random.Random) -> str:
    if order.random() < 0.05:
        return random_text(order, 200)
    if order.random() < 0.05:
        return f"{order.choice(NAMED)}=canary.py:Own{order.choice(('', ':h=8', '+ef'))}"
    text = plan_text(order)
    return mutated(text, order) if order.random() < 0.9 else text


def play_plan(text: str) -> str:
    """A plan that is taken says itself, and holds against a recipe or says why not."""
    plan = Plan.parse(text)
    if Plan.parse(str(plan)) != plan:
        raise AssertionError(f"it is another plan after {str(plan)!r}")
    if (
        plan.auto or plan.dp == -1 or ".py:" in text
    ):  # to hold such a plan against a recipe is to load that file
        return "taken"
    problems = plan.check(_recipe())
    return "taken, refused for the recipe" if problems else "taken and fits"


@cache
def _recipe() -> Recipe:
    return Recipe.model_validate(
        {"data": {"source": "stdlib"}, "train": {"global_batch": 64, "micro_batch": 2}}
    )


def import_members() -> None:
    """All families, so that no import is heard."""
    for package in PACKAGES.values():
        family = family_in(package)
        for name in family.names():
            family.find(name)
    for name in STARTERS.names():
        STARTERS.find(name)
    _recipe(), known("codec"), cli.summaries()
    for text in ("codec=topk:ratio=0.1+ef dp=2", "codec=topk+mc:momentum=0.9 dp=2", "dp=2 nonsense"):
        with_errors(play_plan, text)


def with_errors(play: Callable[[Any], Any], one: Any) -> Any:
    """For what is to be played once before anybody listens."""
    try:
        return play(one)
    except Exception as error:
        return error


# --- flags and variables ---


def _flag(order: random.Random) -> list[str]:
    name = order.choice(list(keys()))
    if order.random() < 0.3:
        name = mutated(name, order)
    value = _key_value(name, order)
    return order.choice(([f"--{name}", value], [f"--{name}={value}"], [f"--no-{name}"], [f"--{name}"]))


def _key_value(name: str, order: random.Random) -> str:
    if name == "plan":
        return _plan(order)
    good = order.choice(
        (
            "1",
            "4",
            "0.1",
            "adamw",
            "cosine",
            "gpt",
            "mlp",
            "moe",
            "stdlib",
            "byte",
            "true",
            "auto",
            "none",
            "0.9,0.95",
            "x.*",
        )
    )
    if order.random() < 0.5:
        return good
    value = mutated(good, order) if order.random() < 0.8 else random_text(order)
    return value if ".py" not in value else value.replace(".py", ".toml")  # a recipe may name code


def _flags(order: random.Random) -> list[str]:
    return [word for _ in range(order.randint(1, 4)) for word in _flag(order)]


def play_flags(words: list[str]) -> str:
    """Flags over the defaults, as a verb reads them."""
    pairs, rest = config.split_flags(words)
    if rest:
        VERBS.find("train")().parser().read(rest)
    return _resolved(config.load(None, pairs))


def _resolved(got: Any) -> str:
    resolved = config.resolve(got.recipe, got.plan, None, got.origins)
    config.resolved_toml(resolved).encode()
    return "taken"


def _variables(order: random.Random) -> dict[str, str]:
    if order.random() < 0.5:
        starter = STARTERS.find(order.choice(STARTERS.names()))()
        told = dict(starter.leaves(0, 0, (2, 2)))
        for name in order.sample(list(told), order.randint(1, len(told))):
            told[name] = mutated(told[name], order)
        return {name: value for name, value in told.items() if order.random() < 0.9}
    names = ["UNISONO_" + name.upper().replace(".", order.choice("_ ").strip() or "__") for name in keys()]
    chosen = order.sample(names, order.randint(1, 4))
    made = {name if order.random() < 0.8 else mutated(name, order): _key_value("", order) for name in chosen}
    return {name: value for name, value in made.items() if "\0" not in name + value}


def play_variables(environ: Mapping[str, str]) -> str:
    """What a shell or a scheduler left there."""
    if not any(name.startswith("UNISONO") for name in environ):
        return "no rank" if env.detect(environ) is None else "a rank"
    return _resolved(config.load(None, (), environ=environ))


# --- whole commands ---

_COMMANDS = (
    'config check --plan "dp=2 pp=2"', "config show --demo", "config diff a.toml b.toml", "train --demo --dry-run", "train a.toml --dry-run --json",
    'simulate --demo --plan "dp=4" --cluster laptop --dry-run', "plan --demo --cluster dgx-a100:8 --top 3 --dry-run --json", "report runs/x --json",
    "verify --demo --plan tp=2 --dry-run", "sample runs/x", "export runs/x --to hf --out here --dry-run", "doctor hang runs/x --patience 1",
    "new --model gpt", "bench codecs --dry-run", "train --resume runs/x --dry-run", "train a.toml --chaos kill:who=1:step=2 --dry-run",
    "lab --hosts 2 --rate 100mbit --dry-run -- true", "train --demo --nonsense", "--version", "config schema",
)  # fmt: skip


def _command(order: random.Random) -> list[str]:
    words = shlex.split(order.choice(_COMMANDS))
    for _ in range(order.choice((0, 1, 1, 2, 3))):
        at = order.randrange(len(words) + 1)
        if order.random() < 0.5 and at < len(words):
            words[at] = mutated(words[at], order)
        else:
            words.insert(at, order.choice((order.choice(JUNK), *_flag(order))))
    dry = [] if words[:1] in (["config"], ["report"], ["--version"]) else ["--dry-run"]
    words = [word.replace("\0", "").replace(".py", ".toml")[:LETTERS] for word in words]
    if words[:1] == ["lab"]:  # what follows a second "--" is the command's
        return ["lab", *dry, *words[1:]]
    return words + dry


LETTERS = 100_000


def play_command(words: list[str]) -> str:
    """One command in this process, and its exit code; no error is one of the program itself."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(words)
    said = err.getvalue()
    sys.__stderr__ and said.encode("utf-8", "backslashreplace")
    if "error U-X00" in said:
        raise AssertionError(said[-600:])
    if "--json" in cli._ours(words) and code and out.getvalue().count("\n") > 1:
        raise AssertionError(f"not one object: {out.getvalue()[:200]!r}")
    if visible(said) != said:
        raise AssertionError(f"it steers a terminal: {said[-300:]!a}")
    return f"exit {code}"


# --- scripts of faults ---


def _chaos(order: random.Random) -> tuple[str, str]:
    """(the word behind --chaos, a file's text)."""
    way = order.randrange(4)
    if way == 0:
        text = f"random:seed={order.randint(0, 99)}:faults={order.randint(1, 8)}:kinds=kill,stop"
        return mutated(text, order), ""
    faults = [
        {"what": order.choice(list(FAULTS)), "who": order.choice((0, 1, "any", "launcher")), "step": order.randint(1, 30),
         "phase": order.choice(PHASES), "late": 0.1}
        for _ in range(order.randint(1, 3))
    ]  # fmt: skip
    if way == 1:
        words = [":".join([f["what"], *(f"{k}={v}" for k, v in f.items() if k != "what")]) for f in faults]
        return mutated(" ".join(map(str, words)), order), ""
    if way == 2:
        text = "\n".join(repr(fault).replace("'", '"') for fault in faults)
    else:
        rows = ("\n".join(f"{k} = {v!r}" for k, v in f.items()) for f in faults)
        text = "\n".join(f"[[fault]]\n{row}" for row in rows)
    return "faults.toml", mutated(text, order)


def play_chaos(one: tuple[str, str]) -> str:
    """A script of faults, in words or in a file, for two ranks and thirty steps."""
    word, text = one
    if text:
        with open("faults.toml", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    read = script.read(word, 2, 30)
    if script.Script.of_text(read.as_text()) != read:
        raise AssertionError("it is another script after crossing to ranks")
    return f"{min(4, len(read.faults))} faults"


def _ready_commands() -> None:
    import_members()
    os.mkfifo("pipe")
    for name in ("a.toml", "b.toml"):
        with open(name, "w") as file:
            file.write('name = "a"\nplan = "dp=2"\n[train]\nsteps = 3\n')
    for line in _COMMANDS:
        play_command(shlex.split(line))


PLANS = Kind("plans", _plan, play_plan, import_members, 24)
FLAGS = Kind("flags", _flags, play_flags, import_members, 12)
VARIABLES = Kind("variables", _variables, play_variables, import_members, 5)
COMMANDS = Kind("commands", _command, play_command, _ready_commands, 4)
CHAOS = Kind("chaos", _chaos, play_chaos, import_members, 8)
assert SECTIONS
