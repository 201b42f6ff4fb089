"""Under which schedules a rank has the gradient of a micro-batch by itself."""

import pytest

from unisono.plan import Plan
from unisono_contrib.config.sections.noise_scale import unmeasurable


@pytest.mark.parametrize(
    ("schedule", "whole"),
    [
        ("1f1b", True),
        ("1f1b:cut=1/3", True),
        ("gpipe", True),
        ("interleaved:v=2", False),
        ("zb1p", False),
        ("zbv", False),
        ("dualpipe", False),
        ("pipedream", False),
    ],
)
def test_schedules_whose_backward_passes_are_whole_are_measured(schedule: str, whole: bool) -> None:
    problems = [*unmeasurable(Plan.parse(f"pp=2 micros=4 schedule={schedule}"), "noise_scale")]
    assert [problem.code for problem in problems] == ([] if whole else ["P44"])
