"""Every row of the odd inputs: taken as it is meant, or named with its place and a remedy. Loops and records have tests
of their own, `tests.library.test_breaks` and `tests.train.data.tokenised.test_records`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import kept_port
from tests.verbs import bad_inputs, odd_inputs
from tests.verbs.odd_inputs import NAMES, OUTSIDE, SAID, Outside, Said
from unisono_contrib.train.data.sources.mixture import SourceMixture

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, no_outside_settings: None) -> None:
    for name in bad_inputs.TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_path_is_taken_as_it_is(name: str) -> None:
    assert odd_inputs.path(name).problems == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:]] + [NAMES[0]]
)
def test_what_lies_there_is_read(name: str) -> None:
    assert odd_inputs.loaded(name).problems == []


@pytest.mark.parametrize("one", SAID, ids=lambda one: one.name)
def test_what_cannot_be_taken_is_named(one: Said) -> None:
    assert odd_inputs.said(one).problems == []


def test_a_locale_of_bytes_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "é.toml").write_text(bad_inputs.RECIPE, encoding="utf-8")
    command = [sys.executable, "-m", "unisono", "config", "show", "é.toml", "--out.dir", "模型", "--json"]
    environ = {**os.environ, **odd_inputs.C}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=True, timeout=100)
    assert "模型" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("one", OUTSIDE, ids=lambda one: one.name)
def test_an_odd_environment_is_lived_in_or_named(one: Outside) -> None:
    with kept_port() as port:
        assert odd_inputs.outside(one, lambda: port).problems == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.7*text:a + 0.3*jsonl:b", [(0.7, "text:a"), (0.3, "jsonl:b")]),
        ("  text:a  +  2*text:b ", [(1.0, "text:a"), (2.0, "text:b")]),
        ("text:a/*.txt + text:b*", [(1.0, "text:a/*.txt"), (1.0, "text:b*")]),
    ],
)
def test_parts_of_a_mixture(text: str, parts: list[tuple[float, str]]) -> None:
    assert SourceMixture(parts=text).weighed() == parts


def test_there_are_more_than_a_hundred() -> None:
    counts = len(NAMES), len(SAID), len(OUTSIDE), len(odd_inputs.ODD)
    assert sum(counts) > 120
