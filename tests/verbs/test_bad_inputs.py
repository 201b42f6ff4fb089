"""Every row of the table of bad inputs: right code, right place, a remedy that works, nothing left behind."""

import pytest

from tests.verbs import bad_inputs
from tests.verbs.bad_inputs import AT_ONCE, Bad

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, no_outside_settings: None) -> None:
    for name in bad_inputs.TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("bad", AT_ONCE, ids=lambda bad: bad.name[:60].replace("/", "|"))
def test_answered_at_once(bad: Bad) -> None:
    answer, problems = bad_inputs.at_once(bad)
    assert problems == [], answer.err


def test_there_are_a_hundred_and_fifty() -> None:
    assert len(AT_ONCE) >= 150 and len({bad.name for bad in AT_ONCE}) == len(AT_ONCE)
