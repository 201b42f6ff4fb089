"""Functions are verbs and values are nouns: words that say nothing by themselves name nothing in the source."""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.house.source import FILES, place_of, tree_of

FORBIDDEN = {"told", "made", "found", "one", "own", "given", "some", "asked"}
LEFT = {"launch": 1}
"""By room, how many such names it may have yet; a number only goes down. The one of launch is a key of doctor's JSON."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of all that a file binds: variables, parameters, attributes, functions, classes, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.arg():
                yield node.lineno, node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
                yield node.lineno, node.name
            case ast.alias() if node.asname:
                yield node.lineno, node.asname


def forbidden(tree: ast.AST) -> list[tuple[int, str]]:
    """Those of them that are forbidden, with or without an underscore before or behind."""
    return sorted({(line, name) for line, name in bound_names(tree) if name.strip("_") in FORBIDDEN})


def test_no_name_is_a_participle_or_a_pronoun() -> None:
    places = [f"{place_of(path)}:{line}: {name}" for path in FILES for line, name in forbidden(tree_of(path))]
    counts = Counter(place.partition("/")[0] for place in places)
    over = {room: number for room, number in counts.items() if number > LEFT.get(room, 0)}
    assert over == {}, "\n".join(place for place in places if place.partition("/")[0] in over)


@pytest.mark.parametrize(
    "line",
    ["told = 1", "def made(): pass", "self.found = 2", "f = lambda own: 0", "def f(*, given): pass", "_asked = {}",
     "for one in x: pass", "[some for some in x]", "import a as told", "class found: pass"],
)  # fmt: skip
def test_such_names_are_seen(line: str) -> None:
    assert forbidden(ast.parse(line))


@pytest.mark.parametrize("line", ["x = made", "'''One.'''", "foundation = 1", "call(given=3)"])
def test_others_are_not(line: str) -> None:
    assert not forbidden(ast.parse(line))
