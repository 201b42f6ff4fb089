"""What a policy says of its replicas is drawn where it is there, and damaged lines are left out."""

from pathlib import Path

import pytest

from tests.report.runs import write_run
from tests.report.test_sections import with_values
from unisono.report import instruments, page
from unisono.report.collect import collect
from unisono.spec.words import INSTRUMENTS, instrument


def test_every_instrument_has_a_title_and_words() -> None:
    assert set(instruments.TITLES) == set(INSTRUMENTS)
    assert (
        instrument("staleness", 1.25) == "staleness 1.25"
        and instrument("idle_share", 0.12) == "idle share 12 %"
    )


@pytest.mark.parametrize("key", INSTRUMENTS)
def test_each_is_a_curve_over_the_steps_that_say_it(tmp_path: Path, key: str) -> None:
    run = collect(with_values(tmp_path / "run", key, [None, 2.0, "x", 3.0, True, None]))
    (chart,) = instruments.curves([(run, "a", "accent")])
    assert chart.title == instruments.TITLES[key]
    assert [line.points for line in chart.lines] == [[(2.0, 2.0), (4.0, 3.0)]]
    assert 'data-testid="replicas"' in page.page(run, page.analyse.analyse(run))


def test_runs_without_them_have_no_section(tmp_path: Path) -> None:
    run = collect(write_run(tmp_path / "run", steps=6))
    assert instruments.section(run) == "" and instruments.sheet_rows(run) == []


def test_counts_are_summed_over_steps_of_any_length(tmp_path: Path) -> None:
    counts = [[3], [1, 1, 0, 0], None, [0, 0, 2], "x", [-1, 9]]
    run = collect(with_values(tmp_path / "run", instruments.COUNTS, counts))
    assert instruments.staleness(run) == [4, 1, 2, 0]
    chart = instruments.histogram(run)
    assert chart is not None and [bar.stop for bar in chart.bars] == [4, 1, 2]
    assert chart.rows[0].value == "4, 57 %"


def test_what_is_very_stale_is_counted_in_the_last_row(tmp_path: Path) -> None:
    run = collect(with_values(tmp_path / "run", instruments.COUNTS, [[1] * 100]))
    chart = instruments.histogram(run)
    assert chart is not None and len(chart.rows) == instruments.ROWS
    assert (
        sum(bar.stop for bar in chart.bars) == 100
        and chart.rows[-1].name == f"{instruments.ROWS - 1} or more"
    )


def test_counts_of_nothing_are_no_histogram(tmp_path: Path) -> None:
    assert (
        instruments.histogram(collect(with_values(tmp_path / "run", instruments.COUNTS, [[0, 0], []])))
        is None
    )
