"""`unisono config show|check|schema|diff`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.spec.runs import CONFIG, run_folder
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded, started_ranks

_FILES = {"show": (0, 1), "check": (0, 1), "schema": (0, 0), "diff": (2, 2)}


class ConfigVerb(RecipeVerb):
    """Show, check or compare recipes; JSON schema.

    show   [FILE]   every value as TOML, and where it was set
    check  [FILE]   all problems at once, or ok with the plan and the batch
    schema          JSON schema of a recipe file, for editors
    diff   A B      the keys in which two recipes (or runs) differ
    """

    name = "config"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("what", choices=tuple(_FILES))
        parser.add_argument(
            "files", nargs="*", metavar="FILE", help="recipe: FILE.toml, FILE.py:FUNCTION or a run folder"
        )
        parser.add_argument("--demo", action="store_true", help="the built-in recipe")
        parser.add_argument("--plan", metavar="PLAN", help="a plan instead of the recipe's")

    def run(self, call: CommandCall) -> Result:
        from unisono import config

        args, say = call.args, call.settings.say
        least, most = _FILES[args.what]
        if not least <= len(args.files) <= most:
            takes = " to ".join(str(n) for n in sorted({least, most}))
            what = f"config {args.what} takes {takes} files, not {len(args.files)}"
            raise UsageError(what, where="unisono config", fix="unisono config --help", code="C04")
        files = [str(run_folder(name) / CONFIG) if Path(name).is_dir() else name for name in args.files]
        if args.what == "schema":
            schema = config.schema()
            say(json.dumps(schema, indent=2))
            return {"schema": schema}
        if args.what == "diff":
            return _diff(call.settings, args.files, *(loaded(call, name) for name in files))
        loaded_recipe = loaded(call, files[0] if files else None, demo=args.demo)
        resolved = config.resolve(
            loaded_recipe.recipe, loaded_recipe.plan, started_ranks(call), loaded_recipe.origins
        )
        recipe, plan, batch = resolved.recipe, resolved.plan, str(resolved.batch)
        if args.what == "show":
            say(config.resolved_toml(resolved).rstrip("\n"))
            return {"recipe": config.as_json(recipe), "plan": str(plan), "origins": resolved.origins}
        say(f"ok  plan {plan} on {plan.world} ranks, {batch}")
        for line in loaded_recipe.plan.idle():
            call.settings.note(f"note  {line}")
        return {"ok": True, "plan": str(plan), "ranks": plan.world, "batch": batch}


def _diff(settings: Settings, names: list[str], a: Any, b: Any) -> Mapping[str, Any]:
    from unisono.config import differences

    rows = [
        {"key": key, "a": x, "b": y, "origin_a": a.origins[key], "origin_b": b.origins[key]}
        for key, x, y in differences(a.recipe, b.recipe)
    ]
    width = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        settings.say(
            f"{row['key']:<{width}}  {row['a']} ({row['origin_a']})  ->  {row['b']} ({row['origin_b']})"
        )
    if not rows:
        settings.say(f"{names[0]} and {names[1]} say the same")
    return {"differences": rows}
