"""Every model kind, source, optimiser, rate, loss and metric, held to its suite; each suite finds planted faults."""

from pathlib import Path

import pytest

from unisono.spec.model import MODELS
from unisono.spec.source import SOURCES
from unisono.spec.training import LOSSES, METRICS, OPTIMISERS, RATES
from unisono_contrib.verify.conformance import families, held

OWN = Path(__file__).with_name("recipes.py")
MINE = (MODELS, SOURCES, OPTIMISERS, RATES, LOSSES, METRICS)
MEMBERS = [name for family in MINE for name in family.names() if family.find(name).main in ("", "smoothing")]


def test_all_are_families_of_the_source() -> None:
    assert {family.noun for family in MINE} <= {family.noun for family in families()}


@pytest.mark.parametrize("name", [*MEMBERS, "cross_entropy:smoothing=0.1"])
def test_every_member_passes_its_suite(name: str, tmp_path: Path) -> None:
    judged = held(name, tmp_path)
    assert judged.faults == () and len(judged.suites) == 2


def test_files_pass_too(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(bytes(range(1, 200)) * 2)
    for scheme in ("text", "bin"):
        assert held(f"{scheme}:{tmp_path / 'words'}", tmp_path).faults == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Greedy", "says that it keeps 1 numbers"),
        ("Nameless", "names the state ['velocity']"),
        ("Lawless", "another param than its step"),
        ("Apart", "weight decay is a part of the gradient"),
        ("Rising", "leaves the range"),
        ("Mean", "no sum over targets"),
        ("Share", "do not add up"),
        ("Misread", "declares classes 11 and has 10"),
        ("Deeper", "declares a depth of 3 and has 2"),
    ],
)
def test_a_planted_fault_is_found(name: str, words: str, tmp_path: Path) -> None:
    assert any(words in fault for fault in held(f"{OWN}:{name}", tmp_path).faults)
