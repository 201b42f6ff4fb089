"""Bars and curves stay inside their plots, whichever pen draws them, and nothing of them is lost."""

import io
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.report import html, picture, sheet
from unisono.report.pens import PngPen, SvgPen
from unisono.report.picture import (
    PALETTE,
    Bar,
    BarChart,
    BarRow,
    ChartAxis,
    ChartLine,
    LineChart,
    draw_bars,
    line_chart,
)
from unisono.report.placed import bars

SVG = "{http://www.w3.org/2000/svg}"


def timetable(title: str = "a timetable", until: float | None = None) -> BarChart:
    placed = play_costs(SCHEDULES.read("1f1b").timetable(4, 8), 1.0, 2.0)
    rows = [BarRow(f"rank {rank}") for rank in range(4)]
    return BarChart(title, rows, bars(placed), until or max(p.stop for p in placed))


def rects(drawn: str) -> list[tuple[float, float]]:
    found = re.findall(r'<rect x="([-\d.]+)%" y="[\d.]+" width="([-\d.]+)%"', drawn)
    return [(float(left), float(wide)) for left, wide in found]


def test_every_action_is_a_bar_within_its_row() -> None:
    drawn = html.bars(timetable('<"4 & 8">'))
    ElementTree.fromstring(f"<div>{drawn}</div>")
    assert drawn.count("<title>") == 2 * 4 * 8 and "&lt;&quot;4 &amp; 8&quot;&gt;" in drawn
    assert all(left >= 0 and left + wide <= 100.01 for left, wide in rects(drawn))


def test_two_pictures_can_share_a_time_axis() -> None:
    alone, beside = (rects(html.bars(timetable(until=until)))[-1][1] for until in (33.0, 66.0))
    assert beside == pytest.approx(alone / 2, abs=1e-3)


def test_labels_are_left_out_where_they_do_not_fit() -> None:
    both = [Bar(0, 0.0, 99.0, "forward", "wide"), Bar(0, 99.0, 100.0, "backward", "narrow")]
    drawn = html.bars(BarChart("labels", [BarRow("a")], both, 100.0))
    assert ">wide<" in drawn and ">narrow<" not in drawn


def test_the_legend_names_what_is_drawn_and_no_more() -> None:
    assert list(timetable().legend.values()) == ["forward", "backward"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_sheet_is_as_wide_as_promised_and_colours_are_in_it(tmp_path: Path, suffix: str) -> None:
    line = line_chart("loss", [ChartLine("training", [(0.0, 1.0), (9.0, 0.5)], dots=True)])
    path = sheet.write(tmp_path / f"a{suffix}", "A headline " * 30, "said", [[line, None], [timetable()], []])
    if suffix == ".svg":
        root = ElementTree.fromstring(path.read_text())
        height = float(root.attrib["height"])
        tops = [float(rect.attrib["y"]) for rect in root.iter(f"{SVG}rect") if "y" in rect.attrib]
        assert root.attrib["width"] == "1600" and max(tops) < height - 20
        assert PALETTE["forward"][0] in path.read_text() and "var(--" not in path.read_text()
        return
    with Image.open(path) as image:
        assert image.size[0] == 1600
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    wanted = (PALETTE[name][0] for name in ("paper", "idle", "forward", "backward", "accent"))
    assert {tuple(bytes.fromhex(colour[1:])) for colour in wanted} <= colours


def test_both_pens_put_a_bar_at_the_same_place() -> None:
    chart = BarChart("one", [BarRow("a")], [Bar(0, 2.0, 5.0, "forward")], 10.0)
    svg, png = SvgPen(page=False), PngPen(400, 40)
    for pen in (svg, png):
        draw_bars(pen, chart, 100.0, 0.0, 200.0)
    assert 'x="140.000" y="2" width="60.000" height="24"' in svg.parts[-1]
    with Image.open(io.BytesIO(png.file(400, 40))) as image:
        row = [image.convert("RGB").getpixel((x, 14)) for x in range(400)]
    blue = tuple(bytes.fromhex(PALETTE["forward"][0][1:]))
    assert [x for x, colour in enumerate(row) if colour == blue][::58] == [140, 198]


def test_letters_that_the_font_lacks_become_others(tmp_path: Path) -> None:
    """A box with a cross in it would say nothing."""
    pens = PngPen(300, 60), PngPen(300, 60)
    for pen, said in zip(pens, ("12 µs – é −3", "12 us - e -3"), strict=True):
        pen.text(10, 30, said, 14, "ink")
    assert pens[0].file(300, 60) == pens[1].file(300, 60)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e6, 1e6)), min_size=1, max_size=50), st.booleans())
@example(points=[(0.0, 0.0), (5e-324, 0.0)], zero=False)
def test_curves_stay_inside_their_plot(points: list[tuple[float, float]], zero: bool) -> None:
    points = [(x, abs(y) if zero else y) for x, y in points]
    chart = line_chart("any", [ChartLine("a", points), ChartLine("nothing", [])], zero=zero)
    assert chart is not None and len(chart.lines) == 1
    shares = [(picture.share(x, chart.x), picture.share(y, chart.y)) for x, y in points]
    assert all(-1e-9 <= at <= 1 + 1e-9 for both in shares for at in both)
    marks = [picture.share(at, chart.y) for at, _ in chart.y_ticks]
    assert all(-1e-6 <= at <= 1 + 1e-6 for at in marks)


def test_no_points_are_no_chart() -> None:
    assert line_chart("nothing", [ChartLine("a", [])]) is None


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 9)), min_size=1, max_size=20))
@example(points=[(0.0, 1.0), (1e-300, 1.0)])
def test_by_powers_of_ten_what_is_above_0_stays_inside_and_the_rest_has_no_place(
    points: list[tuple[float, float]],
) -> None:
    chart = line_chart("log", [ChartLine("a", points)], axis=ChartAxis("bytes", whole=False, log=True))
    above = [x for x, _ in points if x > 0]
    assert (chart is None) == (not above)
    if chart is not None:
        shares = [picture.share(math.log10(x), chart.x) for x in above]
        shares += [picture.share(at, chart.x) for at, _ in chart.x_ticks]
        assert all(-1e-9 <= at <= 1 + 1e-9 for at in shares)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.0, 1.0, ["1", "2", "5", "10"]), (-2.0, 2.0, ["0.01", "0.1", "1", "10", "100"]), (0.4, 0.6, [])],
)
def test_marks_of_powers_of_ten(low: float, high: float, said: list[str]) -> None:
    assert [word for _, word in picture.log_ticks(low, high)] == said


def test_an_axis_is_named_under_its_curves_and_in_their_readout() -> None:
    drawn = html.curves(
        line_chart("by time", [ChartLine("a", [(0.5, 1.0), (2.0, 0.5)])], axis=ChartAxis("s", whole=False))
    )
    assert '<div class="axis">s</div>' in drawn and "&quot;whole&quot;:false" in drawn and ">0.5<" in drawn
    assert '<div class="axis">step</div>' in html.curves(line_chart("loss", [ChartLine("a", [(1.0, 1.0)])]))


def test_a_chart_with_axes_of_its_own_keeps_them(tmp_path: Path) -> None:
    chart = LineChart("own", [ChartLine("a", [(1.0, 2.0)])], (0.0, 4.0), (0.0, 8.0), [(4.0, "16 ranks")], [])
    assert "16 ranks" in sheet.write(tmp_path / "a.svg", "a", "b", [[chart]]).read_text()
