"""What is known of a run's starts and failures, from its own folder."""

import json
import os
import time
from pathlib import Path

import pytest

from unisono.train.state import history


def written(run: Path, *lines: dict) -> None:
    (run / history.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_ends_and_goes_on_has_two_starts_and_no_failure(tmp_path: Path) -> None:
    history.begin(tmp_path, 0)
    history.note(tmp_path, "end", step=7)
    history.begin(tmp_path, 7)
    past = history.past(tmp_path)
    assert (past.starts, past.failures) == (2, 0)


def test_a_start_without_an_end_was_lost_when_its_last_line_was_written(tmp_path: Path) -> None:
    now = time.time()
    written(tmp_path, {"at": now - 1000, "event": "start", "step": 0})
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (now - 400, now - 400))
    history.begin(tmp_path, 3)
    past = history.past(tmp_path)
    assert (past.starts, past.failures) == (2, 1)
    assert past.uptime == pytest.approx(600, abs=30)
    history.begin(tmp_path, 3)  # lost at once: nothing was written since
    assert history.past(tmp_path).failures == 2


def test_a_failure_within_a_start_does_not_end_it(tmp_path: Path) -> None:
    now = time.time()
    written(
        tmp_path,
        {"at": now - 100, "event": "start", "step": 0},
        {"at": now - 60, "event": "lost", "rank": 1},
        {"at": now - 40, "event": "end", "step": 9},
    )
    past = history.past(tmp_path)
    assert (past.starts, past.failures) == (1, 1) and past.uptime == pytest.approx(60, abs=1)


def test_what_is_no_line_says_nothing(tmp_path: Path) -> None:
    assert history.past(tmp_path) == history.Past()
    (tmp_path / history.FILE).write_text(
        '{"at": 1\n[]\n{"event": "start"}\n{"at": 5.0, "event": "start"}\n{"at"'
    )
    assert history.past(tmp_path).starts == 1
