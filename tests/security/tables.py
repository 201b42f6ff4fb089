"""Kinds of hostile input that are TOML: recipes, clusters and the software on them. Files, links and pipes."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.security.confined import Kind
from tests.security.mutate import JUNK, LONG, mutated, random_text
from tests.security.words import import_members, plan_text, with_errors
from unisono import config
from unisono.config.fields import keys
from unisono.planner import clusters, stack
from unisono_contrib.planner.mixture import mixture

RECIPE = """\
name = "tiny"  # of its folder
seed = 3
plan = "dp=2 pp=2"
extends = "base.toml"
[model]
kind = "gpt"
n_layer = 2
n_head = 2
d_model = 16
context = 8
[data]
source = "stdlib"
[train]
steps = 30
global_batch = 8
betas = [0.9, 0.95]
lr = 1e-3
[launch]
ranks = 4
[out]
track = []
"""
CLUSTER = """\
name = "mine"
node = 8
nodes = 4
cost_per_hour = { value = 2.5, origin = "given", source = "a bill" }
device = "a100-80gb"
[[link]]
name = "nvlink"
size = 8
bandwidth_gb_s = 300
latency_us = 5
ceiling_gb_s = { 2 = 190, 8 = 225 }
[[link]]
name = "ib"
size = 0
bandwidth_gb_s = 25
latency_us = 10
oversubscription = 1.5
topology = "torus2d"
"""
OWN = """\
node = 4
[device]
name = "own"
peak_tflops = { bf16 = 312.0, fp32 = 19.5 }
memory_gb = 80
bandwidth_tb_s = 2.0
[[link]]
name = "wire"
size = 0
bandwidth_gb_s = 10
latency_us = 30
"""
MIXTURE = """\
[[pool]]
like = "dgx-a100"
nodes = 2
[[pool]]
like = "dgx-h100"
nodes = 1
[join]
name = "ethernet"
bandwidth_gb_s = 3.1
latency_us = 30
"""
HOST = """\
name = "here"
device = "cpu-core"
node = 2
[[link]]
name = "memory"
size = 0
bandwidth_gb_s = 5
latency_us = 20
[host]
cores = 2
"""
_LINES = ('x = 1', '[x]', '[[x]]', '"" = 1', "x.y.z = 1", '"a b".c = 2', "a = { b = { c = 1 } }", "d = 1979-05-27T07:32:00Z", "e = 1_000",
          'f = """\nlong\n"""', "g = '''", "h = [", "i = inf", "j = nan", "k = -0.0", "l = 0xFFFFFFFFFFFFFFFFFFFF", "m = true", "n = [[1], [2]]",
          'o = "\\ud800"', 'p = "\\U0010FFFF"')  # fmt: skip
_WIDE: tuple[Callable[[int], str], ...] = (
    lambda n: "a." * (n // 2) + "a = 1",
    lambda n: "x = " + "[" * n,
    lambda n: "x = " + "{a=" * (n // 3),
    lambda n: "x = " + "[" * (n // 2) + "]" * (n // 2),
    lambda n: 'x = "' + "a" * n + '"',
    lambda n: "x = [" + "1," * (n // 2) + "]",
    lambda n: "\n".join(f"k{i} = 1" for i in range(n // 8)),
    lambda n: "\n".join(f"[t{i}]" for i in range(n // 7)),
    lambda n: "x = " + "9" * n,
    lambda n: "#" * n,
    lambda n: "\n" * n,
    lambda n: "= " * (n // 2),
    lambda n: "x = {" + "a." * (n // 2) + "b = 1}",
    lambda n: "[" + "a." * (n // 2) + "a]",
    lambda n: "\n".join("a." * 90 + f"k{i} = 1" for i in range(n // 190)),
)


def _toml(text: str, order: random.Random) -> str:
    """A table after some changes: of lines, of letters, or very wide or deep in one place."""
    lines = text.split("\n")
    for _ in range(order.choice((1, 1, 2, 3))):
        at = order.randrange(len(lines))
        match order.randrange(6):
            case 0:
                lines[at] = mutated(lines[at], order)
            case 1:
                lines.insert(at, order.choice(_LINES))
            case 2:
                key, _, _ = lines[at].partition(" = ")
                lines[at] = f"{key} = {_value(order)}"
            case 3:
                lines[at], lines[-1 - at] = lines[-1 - at], lines[at]
            case 4 if order.random() < 0.2:
                lines.insert(at, order.choice(_WIDE)(order.choice((100, 2000, 20_000, LONG * 4))))
            case _:
                lines[at] = order.choice((lines[at], order.choice(lines), mutated(lines[at], order)))
    return "\n".join(lines)


def _value(order: random.Random) -> str:
    text = order.choice((order.choice(JUNK), r"\u0000", r"\u001b[2J"))
    quoted = '"' + (text if text[:2] == r"\u" else text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    return order.choice((quoted, text, "[]", "{}", "[1, 2]", "true", "-1", "1e308", '""', "[" + quoted + "]"))


def _written(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


# --- recipes ---


def _recipe(order: random.Random) -> tuple[str, dict[str, str]]:
    """(what is asked for, files beside those that are there)."""
    if order.random() < 0.05:
        return order.choice(
            ("pipe", "link", "loop", "folder", "device", "nothing.toml", "", "a\0b", "a" * 5000, *JUNK[:40])
        ), {}
    text = RECIPE.replace('"dp=2 pp=2"', f'"{plan_text(order)}"') if order.random() < 0.3 else RECIPE
    base = 'seed = 4\n[train]\nlr = 0.1\nextends = "recipe.toml"\n'
    match order.randrange(10):
        case 0:  # a chain, perhaps longer than a stack, perhaps a circle
            length = order.choice((2, 2, 2, 30, 40, 300))
            last = order.choice(("", 'extends = "base.toml"\n', 'extends = "recipe.toml"\n'))
            chain = {f"b{i}.toml": f'extends = "b{i + 1}.toml"\n' for i in range(length)} | {
                f"b{length}.toml": last
            }
            return "recipe.toml", {"recipe.toml": text, "base.toml": 'extends = "b0.toml"\n', **chain}
        case 1:
            other = order.choice(
                (
                    r"\u0000",
                    "pipe",
                    "link",
                    "loop",
                    "folder",
                    "device",
                    "../" * 9,
                    "/etc/passwd",
                    "a" * 5000,
                    *JUNK,
                )
            )
            extends = (
                'extends = "'
                + (other if other[:2] == r"\u" else other.replace("\\", "\\\\")).replace('"', "'")
                + '"'
            )
            return "recipe.toml", {"recipe.toml": text.replace('extends = "base.toml"', extends)}
        case 2:
            return "recipe.toml", {"recipe.toml": random_text(order, 300), "base.toml": base}
        case 3:
            return "recipe.toml", {"recipe.toml": text, "base.toml": _toml(base, order)}
        case 4:
            name = order.choice(list(keys()))
            section, dot, leaf = name.partition(".")
            line = f"[{section}]\n{leaf} = {_value(order)}" if dot else f"{name} = {_value(order)}"
            return "recipe.toml", {"recipe.toml": line, "base.toml": base}
        case _:
            return "recipe.toml", {"recipe.toml": _toml(text, order), "base.toml": "seed = 4\n"}


def play_recipe(one: tuple[str, dict[str, str]]) -> str:
    """Read, resolved, and written down again; the same when it is read once more."""
    asked, files = one
    for name, text in files.items():
        _written(name, text.replace(".py", ".toml"))  # a recipe may name code, and then it is run
    try:
        got = config.load(asked)
        resolved = config.resolve(got.recipe, got.plan, None, got.origins)
        _written("again.toml", config.resolved_toml(resolved))
        again = config.load("again.toml")
        if again.recipe != resolved.recipe or again.plan != resolved.plan:
            raise AssertionError("it is another recipe after it was written down")
    finally:
        for name in files:
            os.unlink(name)
    return "taken"


def _ready_recipes() -> None:
    import_members()
    _places()
    with_errors(play_recipe, ("recipe.toml", {"recipe.toml": RECIPE, "base.toml": "seed = 4\n"}))


def _places() -> None:
    """Names that are no files, or lead elsewhere."""
    os.mkfifo("pipe")
    os.symlink("/etc/passwd", "link")
    os.symlink("loop", "loop")
    os.symlink("/dev/zero", "device")
    os.mkdir("folder")


# --- clusters ---


def _cluster(order: random.Random) -> tuple[str, str]:
    """(what stands behind --cluster or --stack, a file's text)."""
    if order.random() < 0.25:
        names = (
            "laptop",
            "dgx-a100:64",
            "dgx-h100:128",
            "dgx-a100:2+dgx-h100:1",
            "plain",
            "./pipe",
            "./device",
            "./folder",
            "./loop",
        )
        name = order.choice(names)
        return mutated(name, order) if order.random() < 0.8 else name, ""
    text = order.choice((CLUSTER, CLUSTER, OWN, MIXTURE, HOST))
    return "./cluster.toml", _toml(text, order) if order.random() < 0.95 else text


def play_cluster(one: tuple[str, str]) -> str:
    """A cluster, a mixture of some, or a stack, by name or file."""
    name, text = one
    if text:
        _written("cluster.toml", text)
    if clusters.is_mixture(name):
        return f"a mixture of {len(mixture(name).pools)}"
    try:
        found: Any = clusters.cluster(name)
    except Exception:
        with_errors(stack.stack, name)
        raise
    for size in (1, 2, 8, 64):
        for level in range(len(found.links)):
            found.links[level].bus_of(size)
        found.levels(1, size), found.levels(size, size)
    return "a cluster" if found.devices else "nothing"


def _ready_clusters() -> None:
    _places()
    for text in (CLUSTER, OWN, MIXTURE, HOST, "x = 1"):
        with_errors(play_cluster, ("./cluster.toml", text))
    with_errors(play_cluster, ("laptop", ""))


RECIPES = Kind("recipes", _recipe, play_recipe, _ready_recipes, 14)
CLUSTERS = Kind("clusters", _cluster, play_cluster, _ready_clusters, 8)
assert Path
