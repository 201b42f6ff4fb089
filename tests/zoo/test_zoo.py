"""The zoo's bugs are found with their cause, and the same code without them is not accused."""

from pathlib import Path

import pytest

from tests.threads import ThreadForkServer
from unisono.library.gradient_check import ENTRY
from unisono_contrib.library.stacks._rank import ENTRY as UPDATES
from unisono_contrib.zoo.__main__ import main
from unisono_contrib.zoo.play import bug_of, names, play, played

pytestmark = pytest.mark.timeout(300)

NO_PATTERN = {"accelerate_4071", "deepspeed_490", "deepspeed_8443_released"}
"""Bugs that are found, and whose cause is in no pattern known."""


@pytest.mark.parametrize("name", ["megatron_lm_6660", "transformers_24725", "torchtitan_4245"])
def test_a_bug_is_found_and_named_and_its_twin_passes(name):
    bug = play(name, ThreadForkServer(ENTRY), ThreadForkServer(UPDATES))
    assert bug.is_named and bug.twin.passed, (bug.verdict, bug.twin)


def test_there_are_twenty_bugs_of_as_many_addresses():
    """A file for each, found by its name."""
    assert len(names()) >= 20


@pytest.mark.slow
def test_each_bug_is_found_in_a_step_and_no_healthy_twin_is_accused():
    bugs = list(played(names()))
    assert len({bug.address for bug in bugs}) >= 20
    assert [bug.name for bug in bugs if not bug.is_caught] == []
    assert [str(bug.twin) for bug in bugs if not bug.twin.passed] == []
    assert {bug.name for bug in bugs if not bug.is_named} <= NO_PATTERN


@pytest.mark.slow
def test_the_command_prints_a_line_for_each(capsys):
    assert main(["4332", "5312"]) == 0
    out = capsys.readouterr().out
    assert "factor_of_axis" in out and "not_updated" in out
    assert "2 bugs: 2 found in one step, 2 with their cause; 2 of 2 healthy twins pass" in out


def test_the_page_has_a_row_for_each_bug():
    """Its errors and causes are those that the command prints with --markdown."""
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    for name in names():
        bug = bug_of(name)
        rows = [
            row for row in page.splitlines() if f"| {bug.STACK} | {' '.join(bug.__doc__.split())} |" in row
        ]
        assert len(rows) == 1, f"python -m unisono_contrib.zoo --markdown: {name}"
        assert f"[{bug.ADDRESS}]" in rows[0] and f"`{bug.CAUSE}`" in rows[0]
