"""The page that follows a batch names every file that a step really calls, and counts what a reader reads."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import unisono
from tests.train.small import recipe, started
from unisono.train.step.train_step import next_step

SOURCE = Path(unisono.__file__).parent
PAGE = (Path(__file__).parents[3] / "docs" / "one-batch.md").read_text()

pytestmark = pytest.mark.timeout(120)


def called(ctx, folder):
    """Files of ours of which a function is called in one step, after a first one."""
    run, feed, _ = started(ctx, recipe(Path(folder)), "dp=2")
    next_step(run, feed)
    files = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := Path(frame.f_code.co_filename)).is_relative_to(SOURCE):
            files.add(str(file.relative_to(SOURCE)))

    sys.setprofile(look)
    try:
        next_step(run, feed)
    finally:
        sys.setprofile(None)
    return sorted(files)


def test_the_page_names_every_file_that_a_step_calls(world, tmp_path) -> None:
    for files in world(called, 2, folder=str(tmp_path)):
        assert [file for file in files if file not in PAGE] == []


def test_the_page_counts_what_a_reader_reads() -> None:
    block = PAGE.partition("```text\n")[2].partition("```")[0]
    stations = re.findall(r"^([a-z_/]+\.py)", block, re.MULTILINE)
    files, lines = re.search(r"(\d+) files, about ([\d,]+) lines", PAGE).groups()
    real = sum(len((SOURCE / name).read_text().splitlines()) for name in stations)
    assert len(stations) == int(files)
    assert abs(real - int(lines.replace(",", ""))) <= 0.1 * real, f"{real} lines"
