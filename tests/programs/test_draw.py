from unisono.programs import draw
from unisono.programs.pipeline import Action, Placed, play_costs
from unisono.programs.schedules import SCHEDULES

ONE_F_ONE_B = """\
rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  ."""

GPIPE = """\
rank 0  F0 F1 .  .  B0 B1
rank 1  .  F0 F1 B0 B1 ."""


def test_one_f_one_b_with_dear_backwards_as_text() -> None:
    assert draw.text(play_costs(SCHEDULES.read("1f1b").timetable(2, 3), 1, 2)) == ONE_F_ONE_B


def test_gpipe_as_text() -> None:
    assert draw.text(play_costs(SCHEDULES.read("gpipe").timetable(2, 2))) == GPIPE


def test_a_row_of_several_stages_names_them() -> None:
    placed = [Placed(0, Action("F", s, 0), s, s + 1) for s in (0, 1)]
    assert draw.text(placed) == "rank 0  F0/0 F0/1"


def test_nothing_placed_is_nothing_drawn() -> None:
    assert draw.text([]) == ""
