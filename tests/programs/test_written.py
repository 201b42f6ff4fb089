"""A user's own timetable: one function, taken by everything that takes ours, and checked before anything runs."""

from pathlib import Path

import pytest

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.programs import draw
from unisono.programs.pipeline import bubble, peak_held, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity

OURS = ["gpipe", "1f1b", "interleaved", "zb1p", "zbv"]

FILE = '''
from unisono.programs import draw
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES

def pairs(ranks, micros):
    """Two forward, two backward."""
    row = []
    for i in range(0, micros, 2):
        both = range(i, min(i + 2, micros))
        row += [f"F{m}" for m in both] + [f"B{m}" for m in both]
    return [row] * ranks

def stuck(ranks, micros):
    return [" ".join(f"{k}{m}" for m in range(micros) for k in ("FB" if r else "BF")) for r in range(ranks)]

def short(ranks, micros):
    return [" ".join(f"{k}{m}" for k in "FB" for m in range(micros - r)) for r in range(ranks)]

def crossed(ranks, micros):
    return [[f"F{m}" for m in range(micros)] + [f"B{m}" for m in reversed(range(micros))]] * ranks

def garbled(ranks, micros):
    return ["F0 G0"] * ranks

def narrow(ranks, micros):
    return ["F0 B0"]

def broken(ranks, micros):
    return 1 / 0

def picky(ranks, micros):
    if micros % 4:
        from unisono.spec.errors import UsageError
        raise UsageError("picky takes fours", fix="micros=4")
    return pairs(ranks, micros)
''' + "".join(
    f'''
def like_{name}(ranks, micros):
    table = SCHEDULES.read("{name}").timetable(ranks, micros)
    return draw.text(play_costs(table, weight=1.0))
'''
    for name in OURS
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", OURS)
def test_a_picture_is_read_as_the_timetable_that_drew_it(file: Path, name: str) -> None:
    wanted, got = (SCHEDULES.read(one).timetable(2, 4) for one in (name, f"{file}:like_{name}"))
    assert (got.rows, got.placement) == (wanted.rows, wanted.placement)
    assert draw.text(play_costs(got, weight=1.0)) == draw.text(play_costs(wanted, weight=1.0))


def test_what_prices_ask_is_read_off_it(file: Path) -> None:
    own, ours = SCHEDULES.read(f"{file}:like_zb1p"), SCHEDULES.read("zb1p")
    assert own.halves and own.placement(3) == ours.placement(3)
    made = own.timetable(3, 6)
    assert [own.held(row, 3, 6) for row in range(3)] == list(peak_held(made))
    placed = play_costs(made, 1.0, 1.0, weight=1.0)
    length = max(p.stop for p in placed)
    assert own.idle(3, 6, 1.0, 2.0, 1.0) == pytest.approx(bubble(placed) * length)


def test_it_promises_the_bits_of_one_device(file: Path) -> None:
    assert fidelity_of(Plan.parse(f"pp=2 schedule={file}:pairs")) is Fidelity.EXACT


@pytest.mark.parametrize(
    "name, match",
    [
        ("stuck", "has B0.0 before F0.0, and"),
        ("short", "F1.3 happens 0 times, and"),
        ("crossed", "B0.2 comes after that of micro-batch 3"),
        ("garbled", "row 0 has 'G0'"),
        ("narrow", "1 rows for 2 ranks"),
        ("nothing", "has no schedule nothing"),
    ],
)
def test_what_cannot_end_or_lacks_something_is_refused_before_anything_runs(
    file: Path, name: str, match: str
) -> None:
    recipe = Recipe(
        model=ModelConfig(n_layer=2, d_model=8, n_head=1, context=4), train=TrainConfig(global_batch=4)
    )
    with pytest.raises(UsageError, match=match):
        resolve(recipe, f"pp=2 micros=4 schedule={file}:{name}")


def test_what_the_function_raises_is_the_users(file: Path) -> None:
    with pytest.raises(Exception, match="division by zero"):
        SCHEDULES.read(f"{file}:broken").timetable(2, 4)


def test_numbers_that_it_refuses_are_problems_of_the_plan(file: Path) -> None:
    own = SCHEDULES.read(f"{file}:picky")
    assert own.serves(2, 8) and not own.serves(2, 6) and own.placement(3) == (0, 1, 2)
