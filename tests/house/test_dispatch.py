"""Who asks what kind of model, machine or schedule he has before him, outside of the file that says it, missed a trait."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import unisono.planner
from unisono.codecs import CODECS
from unisono.programs.schedules import SCHEDULES
from unisono.spec.model import MODELS
from unisono.sync import POLICIES

PLANNER = Path(unisono.planner.__file__).parent
KINDS = {"Transformer", "Network"}
# One file says which functions a kind of model has, one the functions of a machine.
HOMES = {"model_kinds.py": "kind", "pricing.py": "machine"}
NAMES = {*SCHEDULES.names(), *MODELS.names(), *CODECS.names(), *POLICIES.names()} - {
    "plain",
    "none",
    "auto",
}  # words of other keys, too


def dispatches(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """(what is asked about, line, the question) in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.Compare):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if names & KINDS and names & {"isinstance", "type"}:
                yield "kind", node.lineno, ast.unparse(node)
        if isinstance(node, ast.Name) and node.id == "shares_cores":
            yield "machine", node.lineno, ast.unparse(node)
        if isinstance(node, ast.Compare | ast.match_case):
            words = {word.value for word in ast.walk(node) if isinstance(word, ast.Constant)}
            if NAMES & {word for word in words if isinstance(word, str)}:
                yield "name", getattr(node, "lineno", 0), ast.unparse(node)


def found(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)}:{line}: {said}"
        for path in sorted(folder.rglob("*.py"))
        for what, line, said in dispatches(ast.parse(path.read_text()))
        if HOMES.get(path.name) != what
    ]


def test_the_planner_asks_for_no_kind() -> None:
    assert found(PLANNER) == []


@pytest.mark.parametrize(
    "text",
    ["isinstance(model, Network)", "isinstance(x.model, (int, Transformer))", "type(m) is Network", "shares_cores(m, c)",
     "name == 'dualpipe'", "x in ('gpipe', 'other')", "sync != 'canonical'"],
)  # fmt: skip
def test_what_asks_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(f"if {text}:\n    pass\n")
    assert found(tmp_path)
