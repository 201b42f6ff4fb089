"""`config.resolved.toml`: every value that ran, and where it came from as a comment on its line."""

import json
from typing import Any

from unisono.config.fields import SECTIONS, TOP, keys
from unisono.config.models import Recipe
from unisono.config.resolve import Resolved
from unisono.config.toml import toml
from unisono.plan.grammar import families


def resolved_toml(resolved: Resolved) -> str:
    """The text of `config.resolved.toml`; reading it back gives the same recipe and plan."""
    head = ["# Everything that was resolved; the comment says where a value was made.", f"# {resolved.batch}"]
    return recipe_toml(resolved.recipe, dict(resolved.origins), head)


def recipe_toml(recipe: Recipe, origins: dict[str, str], head: list[str]) -> str:
    """A recipe as TOML, with origins as comments; keys that mean nothing to its kind of model are left out."""
    lines = list(head)
    section = ""
    idle = recipe.train.options() - recipe.train.meant()
    for name in (
        *TOP,
        *(f"{section}.{leaf}" for section in SECTIONS for leaf in dict(getattr(recipe, section) or ())),
    ):
        here, dot, leaf = name.partition(".")
        if here == "train" and leaf in idle:
            continue
        if dot and here != section:
            section = here
            lines += ["", f"[{section}]"]
        lines.append(_line(leaf if dot else name, value_of(recipe, name), origins.get(name, "default")))
    return "\n".join(lines) + "\n"


def _line(leaf: str, value: Any, origin: str) -> str:
    comment = "".join(c if c.isprintable() else "?" for c in origin)
    if value is None:
        return f"# {leaf} is not set  # {comment}"
    return f"{leaf} = {toml(value)}  # {comment}"


def value_of(recipe: Recipe, name: str) -> Any:
    """The value under a dotted key; None for a key of another kind of model."""
    section, dot, leaf = name.partition(".")
    return getattr(getattr(recipe, section), leaf, None) if dot else getattr(recipe, name)


def differences(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) for every key that differs."""
    model_keys = (f"model.{leaf}" for recipe in (a, b) for leaf in dict(recipe.model))
    both = ((name, value_of(a, name), value_of(b, name)) for name in dict.fromkeys((*keys(), *model_keys)))
    return [(name, x, y) for name, x, y in both if x != y]


def schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors."""
    whole = Recipe.model_json_schema()
    whole["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    whole["title"] = "Unisono recipe"
    whole["properties"]["plan"]["description"] += f"; {families()}"
    whole["properties"]["extends"] = {
        "type": "string",
        "description": "another recipe file, which this one changes",
    }
    return whole


def as_json(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values."""
    return json.loads(recipe.model_dump_json())
