"""A codec of a user's own: the one on the page passes its suite and trains; each mistake is told in a line."""

import re
from pathlib import Path

import pytest

from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.cli import main
from unisono.codecs import CODECS
from unisono.codecs._watched import CodecFault
from unisono.spec.errors import UsageError
from unisono.train.step.train_step import train_step
from unisono_contrib.verify.conformance import held

WRONG = Path(__file__).with_name("wrong.py")
PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The codec that the page shows, in a file."""
    (body,) = re.findall(r"cat > mine\.py <<'END'\n(.*?)^END$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert body.count("\n") <= 40
    (tmp_path / "mine.py").write_text(body, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:Mine"


def trained(ctx, text, plan, steps):  # noqa: F811
    live, feed = started(ctx, text, "gpt", plan)
    losses = [train_step(live, feed.fetch(step, live.leaves)).loss for step in range(steps)]
    return losses, [slot.master.detach().clone() for slot in live.local.slots]


def test_the_one_on_the_page_passes_its_suite_and_trains(mine, tmp_path, threads, text) -> None:  # noqa: F811
    assert held(mine, tmp_path).faults == ()
    results = threads(trained, 2, text=text, plan=f"dp=2 codec={mine}", steps=4)
    assert all((a == b).all() for a, b in zip(results[0][1], results[1][1], strict=True))
    assert results[0][0] == results[1][0] and results[0][0][-1] < results[0][0][0] - 0.3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wrong:too_short", "exchange returns [1279]; grad is [1284], and so is the sum"),
        ("Wrong:without_zeros", "returns [583]; grad is [584], of which the last 1 are zeros"),
        ("Wrong:at_once", "exchange returns a tensor at once; it is a generator"),
        ("Wrong:nothing", "exchange returns nothing; it returns the sum, a tensor [1284]"),
        ("Wrong:bare", "exchange yields a tensor; it yields Sum, Gather, Deal or Sent"),
        ("Wrong:endless", "asked for 100 operations and does not end"),
        ("Wrong:alone", "replica 0 has the end of a bucket of 1284, replica 1 has Sum of [1284] float64"),
        ("Wrong:uneven", "replica 0 has Gather of [5] float64, replica 1 has Gather of [6] float64"),
        ("Wrong:undealt", "yields Deal of [7] float64, which 2 replicas have no equal parts of"),
        ("Wrong:unnamed", "asks memory for 'left', which `keeps` of its coder does not name"),
        ("Wrong:overlong", "decoded of Sent returns [1285]; it returns a tensor [1284], or shorter"),
        ("Unbound", "bind returns Unbound; it returns a subclass of unisono.codecs.Coder"),
        ("Unworked", "work returns 17; it returns a unisono.spec.work.Work"),
        ("AlmostAll", "dp=2: rank 0 sends 3736 bytes a step and declares 3676"),
        ("TooSure", "of its norm; LOSSY allows 0.0001 (`error`)"),
        ("TooSure", "of its parameter's largest; `lost` allows 0.0001"),
    ],
)
def test_a_mistake_is_told_in_a_line(name: str, words: str, tmp_path: Path) -> None:
    faults = held(f"{WRONG}:{name}", tmp_path).faults
    assert any(words in fault for fault in faults), faults
    assert all("\n" not in fault for fault in faults) and len(faults) <= 4


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("Wrong:nothing", "exchange returns nothing; it returns the sum", "def nothing("),
        ("Wrong:nothing+ef21", "exchange returns nothing; it returns the sum", "def nothing("),
        ("Wrong:at_once+ef", "exchange returns a tensor at once; it is a generator", "def exchange("),
        (
            "Wrong:bare",
            "exchange yields a tensor; it yields Sum, Gather, Deal or Sent",
            "return (yield grad)",
        ),
        ("Wrong:too_short+ef", "and so is the sum", "def too_short("),
        ("Wrong:whole+ef", "exchange yields no Sent, and the codec says `tells`", "def whole("),
        ("Wrong:unnamed", "memory for 'left', which `keeps` of its coder does not name", 'memory["left"]'),
        ("Wrong:overlong+ef", "decoded of Sent returns [", "Sent(lambda"),
        ("Unbound", "bind returns Unbound; it returns a subclass", "def bind("),
    ],
)
def test_a_run_tells_a_mistake_at_the_users_line(name, words, line, threads, text) -> None:  # noqa: F811
    with pytest.raises(CodecFault) as error:
        threads(trained, 2, text=text, plan=f"dp=2 codec={WRONG}:{name}", steps=1)
    found = error.value
    assert (found.code, found.exit) == ("R01", 1) and words in found.what
    path, _, at = found.where.partition(" in ")[0].rpartition(":")
    assert Path(path) == WRONG and line in WRONG.read_text().splitlines()[int(at) - 1]


@pytest.mark.parametrize(("name", "lacks"), [("Unfinished", "work"), ("Nameless", "name")])
def test_a_class_that_is_not_finished_is_told_before_anything_is_played(
    name: str, lacks: str, capsys
) -> None:
    with pytest.raises(UsageError, match=f"codec {name} lacks {lacks}"):
        CODECS.read(f"{WRONG}:{name}")
    assert main(["verify", "--conformance", f"{WRONG}:{name}"]) == 2
    assert f"U-P04  codec {name} lacks {lacks}" in capsys.readouterr().err
