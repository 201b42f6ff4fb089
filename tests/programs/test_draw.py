from xml.etree import ElementTree

from unisono.programs import draw
from unisono.programs.pipeline import Action, Placed, play_costs
from unisono.programs.schedules import SCHEDULES

ONE_F_ONE_B = """\
rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  ."""

GPIPE = """\
top     F0 F1 .  .  B0 B1
bottom  .  F0 F1 B0 B1 ."""


def test_one_f_one_b_with_dear_backwards_as_text() -> None:
    assert draw.text(play_costs(SCHEDULES.read("1f1b").timetable(2, 3), 1, 2)) == ONE_F_ONE_B


def test_rows_may_be_named() -> None:
    assert draw.text(play_costs(SCHEDULES.read("gpipe").timetable(2, 2)), names=["top", "bottom"]) == GPIPE


def test_a_row_of_several_stages_names_them() -> None:
    placed = [Placed(0, Action("F", s, 0), s, s + 1) for s in (0, 1)]
    assert draw.text(placed) == "rank 0  F0/0 F0/1"


def test_nothing_placed_is_nothing_drawn() -> None:
    assert draw.text([]) == ""
    ElementTree.fromstring(draw.svg([]))


def test_svg_has_a_block_per_action_within_its_bounds() -> None:
    placed = play_costs(SCHEDULES.read("1f1b").timetable(4, 8), 1, 2)
    root = ElementTree.fromstring(draw.svg(placed, title='<"4 & 8">', scale=1000, unit=" ms"))
    blocks = [node for node in root.iter() if node.tag.endswith("}g")]
    assert len(blocks) == len(placed)
    for block in blocks:
        rect = next(node for node in block if node.tag.endswith("rect"))
        left, wide = (float(rect.attrib[name].rstrip("%")) for name in ("x", "width"))
        assert left >= 8
        assert left + wide <= 100.01
    assert root.find("{http://www.w3.org/2000/svg}title").text == '<"4 & 8">'  # pyright: ignore


def test_two_pictures_can_share_a_time_axis() -> None:
    placed = play_costs(SCHEDULES.read("gpipe").timetable(1, 1))
    alone, beside = draw.svg(placed, gutter=0), draw.svg(placed, gutter=0, until=4.0)
    assert 'width="50.000%"' in alone
    assert 'width="25.000%"' in beside
