"""No file imports, by whatever way, one that imports it: a reader can take each room from the bottom up.

Imports for the type checker and those inside functions count too. One kind does not: the declaration of a member of a
family imports its live part, from a file of its own folder, where it makes it (docs/adr/0016-members-are-files.md).
"""

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from tests.house.test_families import FAMILIES, SOURCE

FOLDERS = {family.package.removeprefix("unisono.") for family in FAMILIES.values()}

# Circles that are still to be mended. Whoever mends one takes it away here; none is added.
LEFT: set[frozenset[str]] = {
    frozenset({"library.job", "library.place"}),
    frozenset({"planner.simulate", "planner.waits"}),
    frozenset({"train.ahead", "train.flow", "train.join", "train.run"}),
    frozenset({"train.keeping", "train.session"}),
    frozenset({"train.optim._frozen", "train.optim._frozen_steps"}),
    frozenset({"verify.cause", "verify.updates"}),
}


def test_no_file_imports_one_that_imports_it() -> None:
    assert {frozenset(circle) for circle in circles(imports())} <= LEFT


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert list(circles(graph)) == [{"b", "c"}]
    assert list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set[str]()})) == []


def circles(graph: Mapping[str, Set[str]]) -> Iterator[set[str]]:
    """The sets of nodes that reach each other."""
    reached = {node: _reached(graph, node) for node in graph}
    seen = set[str]()
    for node in graph:
        if node not in seen and node in reached[node]:
            circle = {other for other in reached[node] if node in reached[other]}
            seen |= circle
            yield circle


def _reached(graph: Mapping[str, Set[str]], node: str) -> set[str]:
    reached, left = set[str](), [*graph[node]]
    while left:
        if (other := left.pop()) not in reached:
            reached.add(other)
            left += graph[other]
    return reached


def imports() -> dict[str, set[str]]:
    """Of each module of the source which others it imports."""
    files = {_module(path): path for path in sorted(SOURCE.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        found = set(_imported(tree, set(files))) - {module}
        if path.name == "__init__.py" and module.rpartition(".")[0] in FOLDERS:
            at_top = set(
                _imported(ast.Module([node for node in tree.body if _is_plain(node)], []), set(files))
            )
            found = {name for name in found if name in at_top or not name.startswith(f"{module}.")}
        graph[module] = found
    return graph


def _is_plain(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, known: Set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = node.module.removeprefix("unisono.") if node.module != "unisono" else ""
            for name in node.names:
                full = f"{base}.{name.name}".lstrip(".")
                if full in known:
                    yield full
                elif base in known and node.module.startswith("unisono"):
                    yield base
        elif isinstance(node, ast.Import):
            yield from {name.name.removeprefix("unisono.") for name in node.names} & known
