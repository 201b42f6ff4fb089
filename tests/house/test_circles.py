"""No file imports, by whatever way, one that imports it: a reader can take each room from the bottom up.

Imports for the type checker and those inside functions count too. One kind does not: the declaration of a member of a
family imports its live part, from a file of its own folder, where it makes it (docs/adr/0016-members-are-files.md).
"""

import ast
from collections.abc import Iterator, Mapping, Set

from tests.house.source import FILES, module_of, tree_of
from tests.house.test_families import FAMILIES

FOLDERS = {
    home
    for family in FAMILIES.values()
    for home in (family.package, family.package.replace("unisono", "unisono_contrib"))
}


def test_no_file_imports_one_that_imports_it() -> None:
    assert list(circles(imports())) == []


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
    known = {module_of(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        module, tree = module_of(path), tree_of(path)
        names = set(_imported(tree, known)) - {module}
        if path.name == "__init__.py" and module.rpartition(".")[0] in FOLDERS:
            plain = ast.Module(
                [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
            )
            at_top = set(_imported(plain, known))
            names = {name for name in names if name in at_top or not name.startswith(f"{module}.")}
        graph[module] = names
    return graph


def _imported(tree: ast.AST, known: Set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield from {full if full in known else node.module} & known
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & known
