"""`unisono new FILE`."""

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb

if TYPE_CHECKING:
    from unisono.config import Recipe


class NewVerb(RecipeVerb):
    """Write a recipe to begin with: every key with its value and what it means.

    Keys given as flags take the place of the demo's: unisono new mine.toml --data.source text:english.txt --plan dp=2
    """

    name = "new"

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "file", metavar="FILE", help="where to write it; a file that exists is left alone"
        )

    def run(self, call: CommandCall) -> Result:
        from unisono import config
        from unisono.config.fields import keys
        from unisono.config.write import recipe_toml

        file = Path(call.args.file)
        if file.suffix != ".toml":
            raise UsageError(
                f"{file} does not end with .toml", where="unisono new", fix=f"{file}.toml", code="C04"
            )
        begun = _begun(dict(call.keys))
        loaded = config.load(None, call.keys, environ=call.environ, base=begun, base_origin="unisono new")
        config.resolve(loaded.recipe, loaded.plan, None, loaded.origins)  # what is written can be trained
        named = loaded.recipe.model_copy(
            update={
                "plan": str(loaded.plan),
                **({"name": file.stem} if "name" not in dict(call.keys) else {}),
            }
        )
        meanings = {name: key.description for name, key in keys().items()} | {
            "plan": 'how it is spread: "dp=2 pp=2", or auto; unisono plan ranks plans'
        }
        head = [f"# unisono train {file}", "# Left out, a key has the value of `unisono config show`."]
        text = recipe_toml(named, meanings, head)
        result = {"file": str(file), "recipe": config.as_json(named)}
        if call.settings.dry_run:
            return call.would(result, text)
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise UsageError(
                f"{file} is there already",
                where="unisono new",
                fix="another name, or take the file away",
                code="C03",
            ) from None
        except OSError as error:
            raise UsageError(
                f"{file} cannot be written: {error.strerror}",
                where="unisono new",
                fix="another folder",
                code="C03",
            ) from None
        call.settings.say(str(file))
        return result


def _begun(flags: dict[str, str | None]) -> "Recipe | None":
    """The demo's recipe, unless another kind of model is asked for: then its sizes mean nothing."""
    from unisono.recipes.demo import demo

    recipe, _ = demo()
    return recipe if flags.get("model.kind", recipe.model.kind) == recipe.model.kind else None
