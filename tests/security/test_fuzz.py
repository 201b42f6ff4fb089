"""Hostile inputs of every kind: no code is run, nothing crashes, hangs or takes all memory; and who watches notices."""

import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.security import confined, fuzz, harm
from tests.security.confined import Kind, played

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.name)
def test_some_of_every_kind(kind: Kind) -> None:
    tally = fuzz.play(kind, 60, seed=1)
    assert tally.wrong == [] and tally.tried == 60
    assert len(tally.seen) > 1, "all of them become the same"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.name)
def test_many_of_every_kind(kind: Kind) -> None:
    assert fuzz.play(kind, 1500, seed=2).wrong == []


def test_the_kinds_share_all_inputs() -> None:
    names = [*(kind.name for kind in fuzz.KINDS), fuzz.OWN]
    for inputs in (1, 99, 100_000):
        counts = fuzz.shares(inputs, names)
        assert sum(counts.values()) == inputs and [*counts] == names


# Who watches.

SYSTEM = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."


def ends(how: Callable[[int], object]) -> list[str]:
    """What is said of a reader that does this to its third input of five."""
    kind = Kind("made up", lambda order: order.randrange(9), lambda given: "fine")
    count = [0]

    def play(given: int) -> str:
        count[0] += 1
        if count[0] == 3:
            how(given)
        return "fine"

    return played(Kind(kind.name, kind.draw, play), range(5)).wrong


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda given: {}[given], "KeyError"),
        (lambda given: os.kill(os.getpid(), 11), "signal 11"),
        (lambda given: os._exit(3), "ended"),
        (lambda given: bytes(4 << 30), "MiB"),
        (lambda given: Path("canary").write_text("run"), "CODE WAS RUN"),
        (lambda given: pickle.loads(SYSTEM), "os.system"),  # noqa: S301
        (lambda given: os.open("/etc/passwd", os.O_RDWR), "to write"),
    ],
)
def test_it_notices(how: Callable[[int], object], said: str) -> None:
    assert any(said in one for one in ends(how))


def test_it_notices_one_that_is_slow_and_one_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "CPU", 0.2)
    monkeypatch.setattr(confined, "STILL", 1.0)

    def spins(given: int) -> None:
        while True:
            pass

    assert "of a core" in ends(spins)[0]
    assert "it hangs" in ends(lambda given: time.sleep(60))[0]


def test_an_input_can_be_had_again() -> None:
    for kind in fuzz.KINDS:
        assert confined.given(kind, 7) == confined.given(kind, 7)


def test_programs_that_mean_harm_do_harm_where_pickle_plays_them(tmp_path: Path) -> None:
    """Else nothing would be shown by their being refused."""
    pid = os.fork()
    if pid == 0:
        os.chdir(tmp_path)
        for number in range(400):
            try:
                name = random.Random(number).choice(harm.HARMFUL)
                pickle.loads(harm.called(name, "touch canary"))  # noqa: S301
            except BaseException:
                continue
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "canary").exists()
