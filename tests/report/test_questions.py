"""What a question about a run asks for: times, steps, ranks; and what is not understood says so."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.report.verdict.evidence import RankSeen, RunEvidence, StepSeen
from unisono_contrib.report.questions import beside, read

BEGAN = datetime(2026, 3, 1, 1, 50).timestamp()  # by this machine's clock, as a question is


def evidence(steps: int = 200, seconds: float = 10.0) -> RunEvidence:
    ranks = tuple(
        RankSeen(
            rank,
            tuple(
                StepSeen(
                    step, {"forward": 1.0 + rank, "wait": 1.0 - rank}, start=BEGAN + seconds * (step - 1)
                )
                for step in range(1, steps + 1)
            ),
        )
        for rank in (0, 1)
    )
    return RunEvidence(ranks)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("", None),
        ("why slow?", None),
        ("why slow at step 100?", (80, 120)),
        ("steps 30 to 50", (30, 50)),
        ("since step 150", (150, 200)),
        ("before step 30", (1, 30)),
        ("why slow at 02:10?", (104, 144)),
        ("2026-03-01 02:10:00", (101, 141)),
        ("between 02:00 and 02:10", (64, 124)),
        ("since 02:20", (184, 200)),
        ("now", (160, 200)),
    ],
)
def test_a_time_or_a_step_is_a_stretch_of_steps(text: str, window: tuple[int, int] | None) -> None:
    question = read(text, evidence())
    assert question.understood and question.window == window


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello there", "no time, step or rank was understood"),
        ("at 23:59", "the run went from 2026-03-01 01:50:00"),
        ("at 99:99", "the run went from"),
        ("step 9000", "the run has steps 1 to 200"),
        ("rank 7", "the run has no rank 7"),
    ],
)
def test_what_is_not_understood_gets_the_whole_run_and_says_so(text: str, why: str) -> None:
    question = read(text, evidence())
    assert (question.window, question.understood) == (None, False)
    assert why in question.said and "whole run" in question.said


def test_a_rank_stands_beside_the_others() -> None:
    question = read("why is rank 1 slow at step 40?", evidence())
    assert (question.rank, question.window) == (1, (20, 60))
    assert beside(evidence(), 1)[0] == "rank 1: forward 2 s, the others 1 s"
    assert beside(evidence(), None) == []


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    question = read(text, evidence())
    assert question.said
    assert question.window is None or 1 <= question.window[0] <= question.window[1] <= 200
