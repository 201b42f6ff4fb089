"""`unisono config show|check|schema|diff`: what a recipe says, whether it holds, what it may say, what differs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.verbs._call import Call, Parser, Verb, common, found_run
from unisono.verbs._running import loaded, started_ranks

_ABOUT = """\
show   [FILE]   every value as TOML, and where it was made
check  [FILE]   all problems at once, or ok with the plan and the batch
schema          JSON schema of a recipe file, for editors
diff   A B      the keys in which two recipes (or runs) differ
"""


def _parser() -> Parser:
    parser = common(Parser(prog="unisono config", description=_ABOUT))
    parser.add_argument("what", choices=("show", "check", "schema", "diff"))
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="recipe: FILE.toml, FILE.py:FUNCTION or a run folder"
    )
    parser.add_argument("--demo", action="store_true", help="the built-in recipe")
    parser.add_argument("--plan", metavar="PLAN", help="a plan instead of the recipe's")
    return parser


def _run(call: Call, words: list[str]) -> Mapping[str, Any] | None:
    from unisono import config

    flags, rest = config.split_flags(words)
    given = _parser().read(rest)
    expected = {"show": (0, 1), "check": (0, 1), "schema": (0, 0), "diff": (2, 2)}[given.what]
    if not expected[0] <= len(given.files) <= expected[1]:
        takes = " to ".join(str(n) for n in sorted(set(expected)))
        what = f"config {given.what} takes {takes} files, not {len(given.files)}"
        raise UsageError(what, where="unisono config", fix="unisono config --help", code="C04")
    files = [_file(name) for name in given.files]
    if given.what == "schema":
        found = config.schema()
        call.say(json.dumps(found, indent=2))
        return {"schema": found}
    if given.what == "diff":
        a, b = (loaded(call, name, False, flags) for name in files)
        return _diff(call, given.files, a, b)
    got = loaded(call, files[0] if files else None, given.demo, flags)
    resolved = config.resolve(got.recipe, got.plan, started_ranks(call), got.origins)
    if given.what == "show":
        call.say(config.resolved_toml(resolved).rstrip("\n"))
        return {
            "recipe": config.as_json(resolved.recipe),
            "plan": str(resolved.plan),
            "origins": resolved.origins,
        }
    call.say(f"ok  plan {resolved.plan} on {resolved.plan.world} ranks, {resolved.batch}")
    return {
        "ok": True,
        "plan": str(resolved.plan),
        "ranks": resolved.plan.world,
        "batch": str(resolved.batch),
    }


def _file(name: str) -> str:
    return str(found_run(name) / "config.resolved.toml") if Path(name).is_dir() else name


def _diff(call: Call, names: list[str], a: Any, b: Any) -> Mapping[str, Any]:
    from unisono.config import differences

    rows = [
        {"key": key, "a": x, "b": y, "origin_a": a.origins[key], "origin_b": b.origins[key]}
        for key, x, y in differences(a.recipe, b.recipe)
    ]
    width = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        call.say(f"{row['key']:<{width}}  {row['a']} ({row['origin_a']})  ->  {row['b']} ({row['origin_b']})")
    if not rows:
        call.say(f"{names[0]} and {names[1]} say the same")
    return {"differences": rows}


VERB = Verb("config", "show, check or compare recipes; JSON schema", _parser, _run)
