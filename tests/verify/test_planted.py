"""Every bug of `planted/` has its place in the source, and a quick test that is asked for it; a few are found here."""

import ast

import pytest

from tests.verify.planted.bug import ROOT, SOURCE, TextBug, all_bugs

BUGS = all_bugs()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_its_place_and_somebody_who_looks(bug: TextBug) -> None:
    source = bug.path(SOURCE).read_text()
    planted = bug.planted(source)
    assert planted != source
    ast.parse(planted)
    assert bug.plans or bug.tests
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / "tests" / file).read_text(), test


def test_names_differ_and_rooms_are_many() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 48
    assert {bug.room for bug in BUGS} >= {"models", "train", "sync", "codecs", "library", "parallel"}
