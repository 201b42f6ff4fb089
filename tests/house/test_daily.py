"""Families of cases that are run by the day are there, and none of them is asked for a planted bug."""

import pytest

from tests.daily import FAMILIES
from tests.house.source import ROOT
from tests.verify.planted.bug import all_bugs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_there_and_finds_no_planted_bug(family: str) -> None:
    file, _, name = family.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    asked = {test for bug in all_bugs() for test in bug.tests}
    assert not {file, family} & asked
