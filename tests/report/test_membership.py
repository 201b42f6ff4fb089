"""Who took part in a run, as its history tells: a band for each rank, a table, and lines for programs."""

import json
import re
from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono.report import membership
from unisono.report.collect import collect
from unisono.report.membership import GONE, TRAINS, WAITS
from unisono.report.page import run

LIFE = [
    {"at": 100.0, "event": "start", "step": 0, "ranks": 2, "plan": "dp=2"},
    {"at": 110.0, "event": "lost", "epoch": 1, "lost": {"1": "killed by SIGKILL"}, "born": [1]},
    {"at": 112.0, "event": "met", "epoch": 1, "step": 40},
    {"at": 120.0, "event": "lost", "whole": True, "lost": {"supervisor": "killed by SIGSEGV"}},
    {
        "at": 125.0,
        "event": "start",
        "step": 30,
        "ranks": 3,
        "plan": "dp=3",
        "hosts": {"joined": ["b"], "gone": []},
    },
    {"at": 130.0, "event": "lost", "epoch": 1, "lost": {}, "born": []},
    {"at": 131.0, "event": "met", "epoch": 1, "step": 50, "ranks": 2},
    {"at": 140.0, "event": "end", "step": 60},
]


def lived(folder: Path, lines: list[dict]) -> Path:
    write_run(folder, steps=6)
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bands(folder: Path, rank: int) -> list[tuple[float, float, str]]:
    chart = membership.chart(collect(folder))
    assert chart is not None
    return [(bar.start, bar.stop, bar.colour) for bar in chart.bars if bar.row == rank]


def test_each_rank_has_its_band(tmp_path: Path) -> None:
    run = lived(tmp_path / "run", LIFE)
    end = [(20.0, 25.0, GONE), (25.0, 30.0, TRAINS), (30.0, 31.0, WAITS), (31.0, 40.0, TRAINS)]
    assert bands(run, 0) == [(0.0, 10.0, TRAINS), (10.0, 12.0, WAITS), (12.0, 20.0, TRAINS), *end]
    assert bands(run, 1) == [(0.0, 10.0, TRAINS), (10.0, 12.0, GONE), (12.0, 20.0, TRAINS), *end]
    assert bands(run, 2) == [(25.0, 30.0, TRAINS), (30.0, 31.0, WAITS)]  # it came later, and went


def test_the_page_has_a_row_for_each_change_and_json_the_lines(tmp_path: Path) -> None:
    told = run(lived(tmp_path / "run", LIFE))
    page = Path(told["report_html"]).read_text()
    (part,) = re.findall(r'<section data-testid="members">.*?</section>', page)
    assert "Who took part: 3 losses, 2 starts" in part
    assert re.findall("<t[dh][^>]*>([^<]*)</t[dh]>", part) == [
        "at", "what", "going on after step", "took",
        "0", "started: 2 ranks, dp=2", "0", "",
        "10 s", "lost: rank 1 (killed by SIGKILL)", "40", "2 s",
        "20 s", "lost: supervisor (killed by SIGSEGV); now 3 ranks, dp=3, hosts joined: b", "30", "5 s",
        "30 s", "lost: a connection between ranks; now 2 ranks", "50", "1 s",
        "40 s", "ended in good order", "60", "",
    ]  # fmt: skip
    assert [line["seconds"] for line in told["members"]] == [0, 10, 12, 20, 25, 30, 31, 40]
    assert told["members"][1]["lost"] == {"1": "killed by SIGKILL"}


@pytest.mark.parametrize("lines", [[], LIFE[:1], [LIFE[0], LIFE[-1]]])
def test_a_run_that_lost_nobody_has_no_such_part(tmp_path: Path, lines: list[dict]) -> None:
    assert membership.section(collect(lived(tmp_path / "run", lines))) == ""


def test_a_run_that_was_killed_is_drawn_as_far_as_its_steps_tell(tmp_path: Path) -> None:
    run = lived(tmp_path / "run", [*LIFE[:2], {**LIFE[2], "step": 3}])
    begin, stop, colour = bands(run, 0)[-1]
    assert (begin, colour) == (12.0, TRAINS) and 0 < stop - begin < 5


def test_lines_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    wrong = [
        {"at": "x"},
        {"at": 3},
        {**LIFE[0], "ranks": "many"},
        {**LIFE[0], "ranks": 10**12},
        {**LIFE[1], "lost": [1]},
    ]
    assert len(collect(lived(tmp_path / "run", [*LIFE, *wrong])).history) == len(LIFE)


def test_of_many_ranks_those_that_were_lost_are_drawn(tmp_path: Path) -> None:
    life = [{**LIFE[0], "ranks": 400}, {**LIFE[1], "lost": {"333": "killed by SIGKILL"}}, LIFE[2], LIFE[-1]]
    chart = membership.chart(collect(lived(tmp_path / "run", life)))
    assert chart is not None and len(chart.rows) == membership.ROWS and chart.rows[-1].name == "rank 333"
