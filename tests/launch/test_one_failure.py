"""The page that follows a failure names files that are there, and a reader is through with them in an evening."""

import re
from pathlib import Path

import unisono

SOURCE = Path(unisono.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "one-failure.md").read_text()


def test_the_way_of_a_failure_is_eight_files_at_most_and_an_evening() -> None:
    block = PAGE.partition("```text\n")[2].partition("```")[0]
    stations = re.findall(r"^([a-z_/]+\.py)", block, re.MULTILINE)
    assert stations == re.findall(r"^## \d\. `src/unisono/([a-z_/]+\.py)`", PAGE, re.MULTILINE)
    lines = {name: len((SOURCE / name).read_text().splitlines()) for name in stations}
    assert 5 <= len(stations) <= 8 and sum(lines.values()) <= 1500, lines
