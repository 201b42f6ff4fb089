"""Every published form of a timetable is what the timetable does, and no form is left out."""

import pytest

from tests.planner import forms
from tests.planner.published import table


def test_every_line_of_the_table_is_looked_at() -> None:
    named = {row["schedule"] for row in table("schedule_bubble_formulas.csv")}
    assert named == {*forms.FORMS, *forms.NOT_NAMED}


@pytest.mark.parametrize("name", forms.FORMS)
def test_closed_forms_are_exact(name: str) -> None:
    for played, said in forms.closed(name):
        assert played == pytest.approx(said, abs=1e-9)


def test_one_set_of_costs_gives_every_rate() -> None:
    for micros, column, ours, theirs in forms.rates():
        assert ours == pytest.approx(theirs, abs=0.006), (micros, column)
