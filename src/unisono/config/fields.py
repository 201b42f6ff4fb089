"""The recipe's keys as a flat list of dotted names, and how a word of text becomes a value of each."""

import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unisono.config.models import Recipe
from unisono.spec.model import listed, model_keys
from unisono.spec.paths import FOREIGN, RENAMED, foreign
from unisono.spec.section import RECIPE_SECTIONS
from unisono.spec.words import LONGEST

SECTIONS = ("model", "data", "train", "launch", "out", *RECIPE_SECTIONS.names())
TOP = ("name", "seed", "plan")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the recipe: its dotted name, its type, its default and what it means."""

    name: str
    annotation: Any
    default: Any
    description: str

    @property
    def boolean(self) -> bool:
        return self.annotation is bool

    @property
    def about(self) -> str:
        """Its meaning and default, for remedies."""
        return f"{self.name}{f': {self.description}' if self.description else ''}, default {self.default}"


@cache
def keys() -> Mapping[str, Key]:
    """Every key of a recipe, in the order of the models."""
    known: dict[str, Key] = {}
    for name, info in Recipe.model_fields.items():
        if name == "model":
            known |= {f"model.{leaf}": key_of(f"model.{leaf}", field) for leaf, field in model_keys().items()}
            known["model.kind"] = replace(known["model.kind"], description=listed())
        elif name in SECTIONS:
            section: Any = next(
                kind for kind in (info.annotation, *get_args(info.annotation)) if _is_model(kind)
            )
            for leaf, inner in section.model_fields.items():
                known[f"{name}.{leaf}"] = key_of(f"{name}.{leaf}", inner)
        else:
            known[name] = key_of(name, info)
    return known


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def key_of(name: str, field: FieldInfo) -> Key:
    """A key from what a model says of it."""
    return Key(name, field.annotation, field.default, field.description or "")


def suggestion(name: str) -> str:
    """The key that was probably meant: the same leaf elsewhere, or the nearest spelling; "" if nothing is near."""
    known = list(keys())
    leaf = name.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same or len(name) > LONGEST:
        return same[0] if same else ""
    close = get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}  # of sections with the same leaf the first
    close = get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)
    return leaves[close[0]] if close else ""


def from_text(key: Key, text: str) -> Any:
    """The value that a flag's or a variable's text stands for; `none` is absence. Raises ValueError."""
    if foreign(text):
        raise ValueError(f"{FOREIGN}: {RENAMED}")
    return text if key.annotation is str else _convert(key.annotation, text.strip())  # blanks may be a path's


def _convert(annotation: Any, text: str) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _convert(get_args(annotation)[0], text)
    if origin in (Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        if any(get_origin(a) is Literal and text in get_args(a) for a in inner):
            return text  # a number, or one of some words
        return None if text.lower() in ("none", "") else _convert(inner[0], text)
    if origin is tuple:
        item = get_args(annotation)[0]
        parts = text.strip("[]()").replace(",", " ").split()
        return tuple(_convert(item, part) for part in parts)
    if annotation is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError("should be true or false")
        return text.lower() in _TRUE
    if annotation is int:
        return _whole(text)
    if annotation is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError("should be a number") from None
    return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)  # 1e6 tokens is how people write a million
    except ValueError:
        raise ValueError("should be a whole number") from None
    if not number.is_integer():
        raise ValueError("should be a whole number")
    return int(number)


def choices(key: Key) -> tuple[str, ...]:
    """The words that a key allows, where it allows only some."""
    return get_args(key.annotation) if get_origin(key.annotation) is Literal else ()
