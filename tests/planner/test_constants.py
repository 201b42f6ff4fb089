"""Every constant of the model names its origin and source; no number hides in a formula."""

import ast
from pathlib import Path

import pytest

import unisono.planner
from benchmarks.fitting.constants import constants
from unisono.parallel import shard
from unisono.planner import memory, unbuffered
from unisono.planner.clusters import cluster
from unisono.planner.stack import names, stack
from unisono.train.step import bucketing

MODEL = (
    "work/blocks",
    "work/expert_parallel",
    "machines/chip",
    "collectives",
    "memory",
    "price",
    "timetables",
    "error_bars",
)
# Public numbers that no price depends on: what a fit may come to, what is worth telling, and units.
LIMITS = {
    ("orders.py", "WORTH"), ("pipeline_play.py", "FEW"), ("predict.py", "MIB"),
    ("simulate.py", "GIB"),
}  # fmt: skip
FOLDER = Path(unisono.planner.__file__).parent


def limit(where: str, name: str) -> bool:
    """Modules beside the model, which search, fit or draw, keep how far they go in private names."""
    return (where, name) in LIMITS or (
        name.startswith("_") and where.removesuffix(".py") not in {Path(name).name for name in MODEL}
    )


def test_every_constant_has_an_origin_and_a_source() -> None:
    found = [constant for constant in constants() if not limit(constant.where, constant.name)]
    assert len(found) > 150
    for constant in found:
        assert constant.source is not None, (constant.where, constant.name)
        assert constant.source.origin in ("specification", "fitted", "measured here"), constant
        assert len(constant.source.text) > 2, constant


def test_a_number_without_a_source_is_found() -> None:
    """Those that are excused are listed too, so nothing is overlooked."""
    bare = {(c.where, c.name) for c in constants() if c.source is None}
    assert bare >= LIMITS


def test_what_is_measured_here_names_the_command_that_measures_it() -> None:
    found = [c for c in constants() if c.source is not None and c.source.origin == "measured here"]
    assert found
    for constant in found:
        path = constant.source.text.partition(":")[0] if constant.source else ""
        assert path.startswith("benchmarks/") and (FOLDER.parents[2] / path).is_file(), constant


def test_a_users_file_may_still_say_what_it_likes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "dgx-a100"\n[[link]]\nname = "one"\nsize = 0\n'
        'bandwidth_gb_s = { value = 3, origin = "assumed", source = "a guess" }\nlatency_us = 9\n'
    )
    link = cluster(str(path)).links[-1]
    assert str(link.sources["bandwidth"]) == "assumed: a guess" and link.sources["latency"].origin == "given"


@pytest.mark.parametrize("name", names())
def test_gradients_and_messages_cross_as_tp_does_where_a_stack_says_nothing_else(name: str) -> None:
    made = stack(name)
    for key in ("dp_bus", "p2p"):
        said = made.sources[key] is not made.sources["tp_bus"]
        assert said or getattr(made, key) == made.tp_bus


def test_buckets_are_those_of_our_reducer() -> None:
    assert memory.BUCKET == bucketing.CAP_BYTES == shard.AT_ONCE
    assert unbuffered.WARM == bucketing.WARM_BYTES


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
