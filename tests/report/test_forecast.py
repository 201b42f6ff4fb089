"""The picture of a priced plan: it adds up, and is readable however long the timetable is."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES
from unisono_contrib.report.forecast import (
    ACTIONS,
    ROWS,
    Forecast,
    sentence,
    timeline,
    waterfall,
    windows,
    write,
)

FACTS: dict[str, Any] = {
    "plan": "dp=2 pp=4 <b>&",
    "cluster": "laptop",
    "stack": "plain",
    "error_pct": 15.0,
    "step_s": 2.0,
    "batch": {"global_batch": 32, "micro_batch": 1, "micros": 16},
    "tokens_per_s": 1e4,
    "mfu": 0.4,
    "tflops_per_device": 0.01,
    "bubble": 0.1,
    "mem_gib": {"params": 1.0, "optim": 0.0, "total": 1.0},
    "capacity_gib": 6.0,
    "days_to_train": 0.0,
    "cost": None,
    "comm": {"dp": {"bytes": 1e6, "seconds": 0.2, "exposed_s": 0.1}},
    "waterfall": [
        {"what": "ideal: the model's arithmetic at peak", "seconds": 1.5},
        {"what": "bubble", "seconds": 0.6},
        {"what": "exposed on dp", "seconds": -0.1},
    ],
}


def made(ranks: int, micros: int, schedule: str = "1f1b") -> Forecast:
    placed = play_costs(SCHEDULES.read(schedule).timetable(ranks, micros), 0.01, 0.02)
    names = [f"pp={row}" for row in range(ranks)]
    return Forecast(FACTS, placed, [("comm dp", 0.1), ("optim", 0.05)], names)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (8, 256), (40, 80)])
def test_windows_show_beginning_and_end_and_nothing_out_of_place(
    schedule: str, ranks: int, micros: int
) -> None:
    forecast = made(ranks, micros, schedule)
    cut = windows(forecast)
    drawn = [p for p in forecast.placed if ranks <= ROWS]
    assert len(cut) == (1 if ranks <= ROWS and len(drawn) <= ACTIONS else 2)
    assert cut[0].begin == 0 and cut[-1].end == pytest.approx(forecast.length)
    for window in cut:
        assert len(window.names) == min(ranks, ROWS)
        assert len(window.placed) <= ACTIONS + len(window.names)
        assert {p.row for p in window.placed} <= set(range(len(window.names)))
        assert all(p.stop > window.begin and p.start < window.end for p in window.placed)
    shown = {(window.names[p.row], p.action) for window in cut for p in window.placed}
    assert shown <= {(forecast.names[p.row], p.action) for p in forecast.placed}
    if len(cut) == 1:
        assert len(shown) == len(forecast.placed)
    assert [part for part, _, _ in cut[-1].after] == ["comm dp", "optim"]


def test_the_sentence_names_what_is_lost_most_and_no_gain() -> None:
    said = sentence(made(4, 16))
    assert "75 %" in said and "the pipeline's bubble (30 %)" in said and "communication" not in said


def test_bars_of_a_waterfall_meet() -> None:
    bars = waterfall(made(1, 1)).bars
    assert [(bar.start, bar.stop) for bar in bars] == [
        (0.0, 1.5),
        (1.5, pytest.approx(2.1)),
        (pytest.approx(2.0), pytest.approx(2.1)),
        (0.0, 2.0),
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    forecast = made(4, 8)
    content = write(forecast, tmp_path / "simulate.png").read_bytes()
    assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20], "big") == 1600


def test_blocks_that_reach_over_a_windows_edge_are_cut_there(tmp_path: Path) -> None:
    forecast = made(8, 256)
    assert len(timeline(forecast)) == 2
    drawn = write(forecast, tmp_path / "simulate.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "<b>&" not in drawn and "The first" in drawn and "The last" in drawn


def test_a_price_of_unknown_error_has_a_picture_too(tmp_path: Path) -> None:
    """Experts, networks of parts, latent attention: nobody has held one beside a measurement."""
    known = made(4, 8)
    unknown = replace(known, facts={**FACTS, "error_pct": None})
    assert "is not known" in write(unknown, tmp_path / "unknown.svg").read_text()
    assert "15 %" in write(known, tmp_path / "known.svg").read_text()
