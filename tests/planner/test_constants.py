"""Every constant of the model names its origin and source; no number hides in a formula."""

import ast
from pathlib import Path

import pytest

import unisono.planner
from unisono.planner.constants import constants
from unisono.spec.cluster import ORIGINS

# Numbers that no price depends on: how far searches go and fits step, and units.
LIMITS = {
    "calibrate.py": {"BOUNDS", "_ROUNDS", "_NUDGE", "_KNEES"},
    "played.py": {"FEW"},
    "predict.py": {"MIB"},
    "search.py": {"_ACTIONS", "_FRONT", "_KEPT", "_MOST_NODES", "_PLAYED"},
    "simulate.py": {"GIB"},
    "space.py": {"_MICRO_BATCHES"},
    "timeline.py": {"LARGEST"},
}
MODEL = ("block", "collectives", "kernels", "memory", "price", "timetables", "trust")
FOLDER = Path(unisono.planner.__file__).parent


def test_every_constant_has_an_origin_and_a_source() -> None:
    found = constants()
    assert len(found) > 150
    for constant in found:
        if constant.name in LIMITS.get(constant.where, ()):
            continue
        assert constant.source is not None, (constant.where, constant.name)
        assert constant.source.origin in ORIGINS and constant.source.origin != "given", constant
        assert len(constant.source.text) > 2, constant


def test_the_limits_are_there_and_nothing_else_is_excused() -> None:
    bare = {(c.where, c.name) for c in constants() if c.source is None}
    assert bare == {(where, name) for where, names in LIMITS.items() for name in names}


@pytest.mark.parametrize("name", MODEL)
def test_numbers_in_formulas_are_counts_and_halves(name: str) -> None:
    """What is fitted, assumed or looked up has a name; formulas count: whole numbers to 64, halves, signs of nothing."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    numbers = {
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    }
    assert {n for n in numbers if not (0 <= n <= 64 and float(2 * n).is_integer())} <= {1e-9}
