"""Every constant of the model with its origin and source: the tables of data, and the numbers in the modules."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import unisono.planner
from unisono.planner.source import Source
from unisono.planner.toml_tables import Table, bundled

PLANNER = Path(unisono.planner.__file__).parent
TABLES = ("devices.toml", "clusters.toml", "stacks.toml")


@dataclass(frozen=True, slots=True)
class Constant:
    """where: table or module; source: None where nothing is said."""

    where: str
    name: str
    value: Any
    source: Source | None


def constants() -> list[Constant]:
    """All of them."""
    return [*_of_tables(), *_of_modules()]


def _of_tables() -> Iterator[Constant]:
    for file in TABLES:
        for name in bundled(file).values:
            yield from _of_table(bundled(file).table(name), f"{file} {name}")


def _of_table(table: Table, where: str) -> Iterator[Constant]:
    for key, value in table.values.items():
        if isinstance(value, list):
            for inner in table.tables(key):
                yield from _of_table(inner, f"{where} {inner.text('name')}")
        elif not isinstance(value, str) and key not in (
            "size",
            "node",
            "nodes",
        ):  # how many: a choice, no constant
            got, source = table.constant(key)
            yield Constant(where, key, got, source if source.origin != "given" else None)


def _of_modules() -> Iterator[Constant]:
    """Module-level names of planner's files that hold numbers; their source stands in their annotation."""
    for path in sorted(PLANNER.rglob("*.py"), key=lambda path: path.name):
        if path.name == "__init__.py":
            continue
        module = import_module(
            ".".join(("unisono.planner", *path.relative_to(PLANNER).with_suffix("").parts))
        )
        hints: Mapping[str, Any] = get_type_hints(module, include_extras=True)
        for name in _numbers(ast.parse(path.read_text(encoding="utf-8"))):
            extras = get_args(hints[name]) if name in hints and get_origin(hints[name]) is Annotated else ()
            source = next((extra for extra in extras if isinstance(extra, Source)), None)
            yield Constant(path.name, name, getattr(module, name), source)


def _numbers(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives a value with a number in it."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            if any(isinstance(value, int | float) and not isinstance(value, bool) for value in held):
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
