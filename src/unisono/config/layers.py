"""Where values come from: defaults < file (with what it extends) < UNISONO_* variables < flags.

A layer is a flat mapping of dotted keys to settings; each setting remembers where it was made.
Variables are spelt UNISONO_TRAIN_LR or UNISONO_TRAIN__LR (sections have no underscore, so both are clear), top-level
keys UNISONO_SEED. UNISONO__ (two underscores at once) is kept for talk between our own processes and never read here.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unisono.config.fields import SECTIONS, TOP, Key, from_text, keys, suggestion
from unisono.config.toml import faults, key_lines, line_of
from unisono.spec.doubtful import TEXT, read_text, toml_of
from unisono.spec.elsewhere import remedy_for
from unisono.spec.errors import Problem
from unisono.spec.words import LONGEST

PREFIX = "UNISONO_"
_CHAIN = 32  # files of which each extends the next
MANY = 200  # unknown keys after which no more are looked up
SHORT = {"model": "model.kind"}  # flags that stand for the key that says most of their section


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was made: `my.toml:7`, `env UNISONO_SEED`, `flag --seed`."""

    value: Any
    origin: str


class Words(str):
    """What a flag or a variable says under a key whose type is not known yet."""


Layer = dict[str, Setting]
Flag = tuple[str, str | None]


def file_layer(path: Path, problems: list[Problem], chain: tuple[str, ...] = ()) -> Layer:
    """Settings of a TOML file over those of the file that it extends. What is wrong goes to `problems`."""
    text, table = _read(path, problems)
    lines = key_lines(text)

    def where(*key: str) -> str:
        line = line_of(lines, key)
        return f"{path}:{line}" if line else str(path)

    layer: Layer = {}
    base = table.pop("extends", None)
    if base is not None:
        layer = _extended(path, base, where("extends"), problems, (*chain, os.path.realpath(path)))
    for name, value in table.items():
        if name in SECTIONS:
            if not isinstance(value, dict):
                problems.append(
                    Problem(
                        "C02",
                        f"{name} is a section, not a value",
                        where(name),
                        f"[{name}] on a line of its own",
                    )
                )
                continue
            for leaf, inner in value.items():
                _put(layer, f"{name}.{leaf}", inner, where(name, leaf), problems)
        elif name == "plan" and isinstance(value, dict):
            words = " ".join(f"{key}={text}" for key, text in value.items())
            what = "the plan is one line of words, not a section"
            problems.append(
                Problem("C01", what, where(name), f'plan = "{words}", before the first [section]')
            )
        elif isinstance(value, dict):
            close = get_close_matches(name[:LONGEST], SECTIONS, n=1, cutoff=0.5)
            hint = f"; did you mean [{close[0]}]?" if close else ""
            problems.append(
                Problem(
                    "C01", f"unknown section [{name}]{hint}", where(name), "sections: " + " ".join(SECTIONS)
                )
            )
        else:
            _put(layer, name, value, where(name), problems)
    return layer


def _read(path: Path, problems: list[Problem]) -> tuple[str, dict[str, Any]]:
    try:
        text = read_text(path, TEXT)
        return text, toml_of(text)
    except FileNotFoundError:
        near = get_close_matches(path.name, _neighbours(path), n=1, cutoff=0.6)
        fix = (
            f"did you mean {path.with_name(near[0])}?"
            if near
            else "check the path, or start from: unisono config show"
        )
        problems.append(Problem("C03", f"no such recipe file: {path}", str(path), fix))
    except tomllib.TOMLDecodeError:
        problems += [
            Problem("C03", f"not TOML: {what}", f"{path}:{line}", fix) for line, what, fix in faults(text)
        ]
    except UnicodeDecodeError:
        problems.append(Problem("C03", "not a text file in UTF-8", str(path), "recipes are TOML text"))
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        what = f"cannot read the recipe: {getattr(error, 'strerror', None) or error}"
        problems.append(Problem("C03", what, str(path), "check the path and its rights"))
    return "", {}


def _neighbours(path: Path) -> list[str]:
    try:
        return [p.name for p in path.parent.iterdir()]
    except OSError:
        return []


def _extended(path: Path, base: Any, where: str, problems: list[Problem], chain: tuple[str, ...]) -> Layer:
    if not isinstance(base, str) or "\0" in base:
        problems.append(Problem("C05", "extends takes one file name", where, 'extends = "base.toml"'))
        return {}
    target = path.parent / base
    if os.path.realpath(target) in chain:
        circle = " -> ".join(Path(p).name for p in (*chain, target))
        problems.append(
            Problem("C05", f"extends goes round in a circle: {circle}", where, "take one of them out")
        )
        return {}
    if len(chain) > _CHAIN:
        what = f"extends leads through more than {_CHAIN} files"
        problems.append(Problem("C05", what, where, "fewer files, each of which says more"))
        return {}
    if not target.exists():
        problems.append(
            Problem(
                "C05",
                f"extends names a file that is not there: {target}",
                where,
                "paths are relative to the file that says extends",
            )
        )
        return {}
    return file_layer(target, problems, chain)


def _put(layer: Layer, name: str, value: Any, origin: str, problems: list[Problem]) -> None:
    if name in keys() or name.startswith("model."):  # perhaps a key of a user's own kind
        layer[name] = Setting(tuple(value) if isinstance(value, list) else value, origin)
    elif len(problems) < MANY:
        problems.append(unknown(name, origin))


def unknown(name: str, origin: str) -> Problem:
    """The problem of a key that no recipe has."""
    section, _, leaf = name.partition(".")
    if "." in leaf or leaf == section:
        what = f"unknown key {name}: inside [{section}] keys stand without its name"
        short = leaf.removeprefix(section).removeprefix(".") or "key"
        return Problem("C01", what, origin, f"{short} = value, below [{section}]")
    if remedy := remedy_for(name):
        return Problem("C01", f"unknown key {name}", origin, remedy)
    close = suggestion(name)
    hint = f"; did you mean {close}?" if close else ""
    about = (
        f"{close}: {keys()[close].description or keys()[close].default}"
        if close
        else "all keys: unisono config show"
    )
    return Problem("C01", f"unknown key {name}{hint}", origin, about)


def _put_text(layer: Layer, name: str, text: str, origin: str, problems: list[Problem]) -> None:
    if name in keys():
        put_text(layer, keys()[name], text, origin, problems)
    elif name.startswith("model."):
        layer[name] = Setting(Words(text), origin)
    else:
        problems.append(unknown(name, origin))


def put_text(layer: Layer, key: Key, text: str, origin: str, problems: list[Problem]) -> None:
    """The value that a text stands for under this key."""
    try:
        layer[key.name] = Setting(from_text(key, text), origin)
    except ValueError as error:
        problems.append(Problem("C02", f"{key.name} = {text!r} {error}", origin, key.about))


def env_layer(environ: Mapping[str, str], problems: list[Problem]) -> Layer:
    """Settings of UNISONO_* variables."""
    layer: Layer = {}
    for variable in sorted(environ):
        word = variable.removeprefix(PREFIX)
        if word == variable or not word or word.startswith("_"):
            continue
        name = word.lower()
        if name not in TOP:
            section, _, leaf = name.partition("_")
            name = f"{section}.{leaf.removeprefix('_')}" if leaf else section
        _put_text(layer, name, environ[variable], f"env {variable}", problems)
    return layer


def flag_layer(flags: Sequence[Flag], problems: list[Problem]) -> Layer:
    """Settings of `(name, text)` pairs from the command line; a text of None is a flag whose value is missing."""
    layer: Layer = {}
    for name, text in flags:
        if text is None and name in keys():
            problems.append(Problem("C04", f"--{name} lacks its value", f"flag --{name}", keys()[name].about))
            continue
        _put_text(layer, name, text or "", f"flag --{name}", problems)
    return layer


def split_flags(argv: Sequence[str], top: Sequence[str] = TOP) -> tuple[list[Flag], list[str]]:
    """Takes `--section.key value` out of a command line; returns the pairs and what is left, in order.

    `--key=value`, `--key value`, and for booleans also `--key` and `--no-key`; `--model gpt` is `--model.kind gpt`.
    `top` are the top-level keys that are flags too.
    """
    pairs: list[Flag] = []
    rest: list[str] = []
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        name, equals, value = word.removeprefix("--").partition("=")
        name = SHORT.get(name, name)
        plain = name.removeprefix("no-")
        if word == "--":
            rest += argv[at:]
            break
        if not word.startswith("--") or not ("." in name or name in top or plain in top):
            rest.append(word)
        elif equals:
            pairs.append((name, value))
        elif name != plain and (plain not in keys() or keys()[plain].boolean):
            pairs.append((plain, "false"))
        elif name in keys() and keys()[name].boolean and not (at < len(argv) and _says_bool(argv[at])):
            pairs.append((name, "true"))
        elif at < len(argv) and not argv[at].startswith("--"):
            pairs.append((name, argv[at]))
            at += 1
        else:
            pairs.append((name, None))
    return pairs, rest


def _says_bool(word: str) -> bool:
    return word.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
